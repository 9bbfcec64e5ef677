# SPDX-License-Identifier: Apache-2.0
"""The operator against plain numpy."""

import pathlib
import re
import threading

import numpy as np
import pytest

import scsa


def reference(q, k, v, scale=None, visible=None, sinks=None, softcap=0.0):
    """Softmax attention in double precision, one query head at a time."""
    q, k, v = (np.asarray(a, dtype=np.float64) for a in (q, k, v))
    n_q, q_heads, head_dim = q.shape
    group = q_heads // k.shape[1]
    scale = 1 / np.sqrt(head_dim) if scale is None else scale
    out = np.zeros_like(q)
    for i in range(n_q):
        seen = np.ones(len(k), bool) if visible is None else visible[i]
        for h in range(q_heads):
            x = scale * k[seen, h // group] @ q[i, h]
            if softcap > 0:
                x = softcap * np.tanh(x / softcap)
            top = max(x.max(), sinks[h]) if sinks is not None else x.max()
            weight = np.exp(x - top)
            total = weight.sum() + (np.exp(sinks[h] - top) if sinks is not None else 0)
            out[i, h] = weight @ v[seen, h // group] / total
    return out


def data(rng, n_q, n_kv, q_heads=6, kv_heads=2, head_dim=64, dtype=np.float32):
    q = rng.standard_normal((n_q, q_heads, head_dim), dtype=np.float32)
    k = rng.standard_normal((n_kv, kv_heads, head_dim)).astype(dtype)
    v = rng.standard_normal((n_kv, kv_heads, head_dim)).astype(dtype)
    return q, k, v


def relative_error(out, expected):
    return np.linalg.norm(out - expected) / np.linalg.norm(expected)


@pytest.fixture
def rng():
    return np.random.default_rng(7)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_exact_attention(rng, dtype):
    q, k, v = data(rng, 3, 700, dtype=dtype)
    out = scsa.exact_attention(q, k, v, n_threads=2)
    assert out.dtype == np.float32 and out.shape == q.shape
    assert relative_error(out, reference(q, k, v)) < 1e-5


def test_one_query_row_without_its_axis(rng):
    q, k, v = data(rng, 1, 100)
    out = scsa.exact_attention(q[0], k, v)
    assert out.shape == q[0].shape
    assert relative_error(out, reference(q, k, v)[0]) < 1e-5


def test_bfloat16_as_its_bits(rng):
    q, k, v = data(rng, 1, 100)
    bits = [(a.view(np.uint32) >> 16).astype(np.uint16) for a in (k, v)]
    cut = [(b.astype(np.uint32) << 16).view(np.float32) for b in bits]
    assert relative_error(scsa.exact_attention(q, *bits), reference(q, *cut)) < 1e-5


def test_q8_0_as_its_bytes(rng):
    q, k, v = data(rng, 1, 100)

    def encoded(a):
        blocks = a.reshape(*a.shape[:2], 2, 32)
        scale = (np.abs(blocks).max(-1, keepdims=True) / 127).astype(np.float16)
        digits = np.rint(blocks / scale.astype(np.float32)).astype(np.int8)
        rows = np.concatenate([scale.view(np.uint8), digits.view(np.uint8)], axis=-1).reshape(*a.shape[:2], 68)
        return rows, (digits * scale.astype(np.float32)).reshape(a.shape)

    (k_rows, k_cut), (v_rows, v_cut) = encoded(k), encoded(v)
    assert relative_error(scsa.exact_attention(q, k_rows, v_rows), reference(q, k_cut, v_cut)) < 1e-4


def test_visible_sinks_softcap_scale_and_strides(rng):
    q, k, v = data(rng, 2, 150)
    visible = rng.random((2, 150)) < 0.5
    sinks = rng.standard_normal(6).astype(np.float32)
    expected = reference(q, k, v, scale=0.3, visible=visible, sinks=sinks, softcap=2.0)
    # Heads before rows in memory, and every second column of a wider mask.
    k_view = np.ascontiguousarray(k.transpose(1, 0, 2)).transpose(1, 0, 2)
    mask = np.repeat(visible, 2, axis=1)[:, ::2]
    out = scsa.exact_attention(q, k_view, v, scale=0.3, visible=mask, sinks=sinks, softcap=2.0)
    assert relative_error(out, expected) < 1e-5


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(q=np.zeros((1, 6, 64))), TypeError, "q must be float32"),
        (dict(q=np.zeros((6 * 64,), np.float32)), ValueError, "q has shape (384)"),
        (dict(q=np.zeros((5, 64), np.float32)), ValueError, "multiple of"),
        (dict(k=np.zeros((10, 2, 32), np.float32)), ValueError, "k has shape (10, 2, 32), expected (n_kv, 2, 64)"),
        (dict(v=np.zeros((10, 3, 64), np.float32)), ValueError, "v has shape"),
        (dict(v=np.zeros((11, 2, 64), np.float32)), ValueError, "k has 10 rows, v has 11"),
        (dict(k=np.zeros((10, 2, 64), np.int64)), TypeError, "k must be float32, float16"),
        (dict(k=np.zeros((10, 2, 128), np.float32)[..., ::2]), ValueError, "the last axis must be dense"),
        (dict(visible=np.ones(9, bool)), ValueError, "visible must have shape"),
        (dict(sinks=np.zeros(5, np.float32)), ValueError, "sinks has 5 values, expected 6"),
        (dict(n_threads=0), ValueError, "thread"),
        (dict(softcap=-1.0), ValueError, "softcap"),
    ],
)
def test_refusals(change, error, message):
    arguments = dict(
        q=np.zeros((6, 64), np.float32), k=np.zeros((10, 2, 64), np.float32), v=np.zeros((10, 2, 64), np.float32)
    )
    scsa.exact_attention(**arguments)
    with pytest.raises(error) as caught:
        scsa.exact_attention(**{**arguments, **change})
    assert message in str(caught.value)


def test_presets():
    fast, seed = scsa.Config("fast"), scsa.Config("seed")
    assert (fast.preset, fast.block_size, fast.cluster_size, fast.packed_format, fast.statistic) == (
        "fast", 256, 8, "none", "mean",
    )
    assert (seed.preset, seed.block_size, seed.cluster_size, seed.packed_format, seed.statistic) == (
        "seed", 4096, 128, "q8_0", "median",
    )
    assert scsa.default_tolerance("fast") == pytest.approx(0.015)
    assert scsa.tau_grid("seed")[0] == 0.5 and len(scsa.tau_grid()) == 13
    with pytest.raises(ValueError, match="preset must be"):
        scsa.Config("slow")
    with pytest.raises(ValueError, match="statistic must be"):
        fast.statistic = "mode"
    assert fast.selection == "flat"
    fast.selection = "automatic"
    assert fast.selection == "automatic"
    with pytest.raises(ValueError, match="selection must be"):
        fast.selection = "deep"
    fast.packed_format = "int8"
    assert fast.packed_format == "int8"
    with pytest.raises(ValueError, match="packed_format must be"):
        fast.packed_format = "q4_0"
    fast.sink = 400
    with pytest.raises(ValueError, match="sink"):
        scsa.Layer(6, 2, 64, fast)


def test_all_clusters_opened_is_exact_attention(rng):
    q, k, v = data(rng, 1, 2000, dtype=np.float16)
    layer = scsa.Layer(6, 2, 64)
    for head in range(2):
        layer.set_tau(head, 0.0)
    layer.seal(k, v)
    out = layer.attend(q, k, v)
    stats = layer.stats
    assert stats.sparse_steps == 1 and stats.exact_steps == 0
    assert stats.union_rows == stats.visible_rows == 2 * 2000
    assert relative_error(out, reference(q, k, v)) < 1e-5


def test_calibration_keeps_to_the_tolerance(rng):
    # Keys in clumps, so that there is something to leave out.
    centres = 4 * rng.standard_normal((40, 1, 64))
    k = (centres[np.arange(4000) // 100] + 0.3 * rng.standard_normal((4000, 2, 64))).astype(np.float16)
    v = rng.standard_normal((4000, 2, 64)).astype(np.float16)
    layer = scsa.Layer(6, 2, 64)
    tolerance = 0.05
    layer.start_calibration(tolerance)
    assert layer.calibrating

    def query():
        return rng.standard_normal((6, 64), dtype=np.float32)

    for _ in range(8):
        q = query()
        np.testing.assert_array_equal(layer.attend(q, k, v), scsa.exact_attention(q, k, v))
    layer.finish_calibration()
    assert not layer.calibrating and layer.calibration_steps == 8
    errors = layer.calibration_errors()
    assert errors.shape == (6, 13, 8)
    # The rule of preset fast: the mean over the heads of a KV head, at the largest grid value within the tolerance.
    grid = scsa.tau_grid()
    for head, tau in enumerate(layer.taus):
        mean = errors[3 * head : 3 * head + 3].mean(axis=(0, 2))
        within = np.flatnonzero(mean <= tolerance)
        low = grid[within[0]] if len(within) else grid[-1]
        high = grid[within[0] - 1] if len(within) and within[0] > 0 else low
        assert low * 0.999 <= tau <= high * 1.001
    layer.set_audit(1.0, seed=3)
    layer.reset_stats()
    measured = []
    for _ in range(8):
        q = query()
        expected = scsa.exact_attention(q, k, v)
        out = layer.attend(q, k, v)
        measured.append(np.linalg.norm(out - expected, axis=-1) / np.linalg.norm(expected, axis=-1))
    stats, summary = layer.stats, layer.audit_summary()
    assert stats.sparse_steps == 8 and 0 < stats.union_rows < stats.visible_rows
    assert summary.outputs == 48 and len(layer.audit_samples()) == 48
    assert summary.mean == pytest.approx(np.mean(measured), rel=1e-3)


def test_changed_rows_drop_their_block(rng):
    _, k, v = data(rng, 1, 1000)
    layer = scsa.Layer(6, 2, 64)
    layer.seal(k, v)
    assert layer.sealed_end == 768 and layer.stats.rebuild_count == 3
    layer.notify_writes([300])
    assert layer.stats.dropped_blocks == 1
    layer.drop_plans()
    assert layer.sealed_end <= layer.config.sink
    with pytest.raises(RuntimeError):
        layer.finish_calibration()
    with pytest.raises(ValueError):
        layer.set_tau(2, 0.1)


def test_threads_may_share_a_layer(rng):
    q, k, v = data(rng, 1, 2000)
    layer = scsa.Layer(6, 2, 64)
    layer.seal(k, v)
    expected = layer.attend(q, k, v)
    outputs = []
    threads = [threading.Thread(target=lambda: outputs.append(layer.attend(q, k, v))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outputs) == 4 and layer.stats.sparse_steps == 5
    for out in outputs:
        np.testing.assert_array_equal(out, expected)


def test_targets(rng):
    q, k, v = data(rng, 1, 300)
    expected = reference(q, k, v)
    try:
        for name in scsa.targets():
            scsa.force_target(name)
            assert scsa.active_target() == name
            assert relative_error(scsa.exact_attention(q, k, v), expected) < 1e-5
    finally:
        scsa.force_target("")
    with pytest.raises(ValueError):
        scsa.force_target("ABACUS")


def test_example_of_the_documentation():
    text = (pathlib.Path(__file__).parents[2] / "docs/python.md").read_text()
    example = re.search(r"## The operator for numpy\n\n```python\n(.*?)```", text, re.S).group(1)
    names = {}
    exec(compile(example, "docs/python.md", "exec"), names)  # noqa: S102
    assert names["layer"].stats.calibration_steps == 32 and names["layer"].stats.sparse_steps == 1
