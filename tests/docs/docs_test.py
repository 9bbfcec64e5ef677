#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""docs_test.py SOURCE SCSA [--write]: the documents against the program and the source.

- docs/reference.md lists every option of the program (with --write that part is written anew) and every environment
  variable that the code reads;
- commands of scsa in the documents parse: they exist and have those options;
- links between the documents lead somewhere.
"""

import pathlib
import re
import shlex
import subprocess
import sys

BEGIN, END = "<!-- options: begin -->", "<!-- options: end -->"
# Where variables of the environment are read, besides the tests: std::getenv and the plugin's table.
VARIABLE = re.compile(r'getenv\("(SCSA_\w+)"|\{"\w+", "(SCSA_\w+)"\}|Variable = "(SCSA_\w+)"')

failures = []


def fail(message):
    failures.append(message)


def read_options(scsa):
    """{command: [(names, argument or "", description)]} from the manual page that the program writes."""
    page = subprocess.run([scsa, "--generate", "man"], check=True, capture_output=True, text=True).stdout
    page = re.sub(r"\\([-&'])", lambda m: m[1].strip("&"), page)
    commands = {}
    for section in re.split(r"^\.SS ", page.split("\n.SH COMMANDS\n")[1].split("\n.SH ENVIRONMENT")[0], flags=re.M)[1:]:
        name, body = section.split("\n", 1)
        options = commands.setdefault(name, [])
        for item in body.split(".TP\n")[1:]:
            lines = item.split("\n")
            names = re.findall(r"\\fB(-[\w-]*)\\fR", lines[0])
            argument = re.search(r"\\fI(.*?)\\fR", lines[0])
            text = []
            for line in lines[1:]:
                if line.startswith("."):
                    break
                text.append(line)
            if names:
                options.append((names, argument[1] if argument else "", " ".join(text).strip().replace("\\e", "\\")))
    return commands


def options_as_tables(commands):
    lines = [BEGIN]
    for command, options in commands.items():
        if not options:
            continue
        lines += ["", f"### {command}", "", "| option | meaning |", "|---|---|"]
        for names, argument, text in options:
            value = f" {argument}" if argument else ""
            lines.append(f"| {', '.join(f'`{name}{value}`' for name in names)} | {text.replace('|', chr(92) + '|')} |")
    return "\n".join(lines + ["", END])


def check_reference(source, commands, write):
    path = source / "docs/reference.md"
    text = path.read_text()
    present = text[text.index(BEGIN) : text.index(END) + len(END)]
    expected = options_as_tables(commands)
    if present != expected and write:
        path.write_text(text.replace(present, expected))
    elif present != expected:
        for line in sorted(set(expected.split("\n")) ^ set(present.split("\n"))):
            fail(f"docs/reference.md and the program's options differ: {line}")
        fail(f"to write that part anew: python3 {sys.argv[0]} {sys.argv[1]} {sys.argv[2]} --write")

    read = set()
    for file in (source / "src").rglob("*.cc"):
        read |= {name for names in VARIABLE.findall(file.read_text()) for name in names if name}
    if len(read) < 9:
        fail(f"found only these variables in the source: {sorted(read)}")
    listed = set(re.findall(r"^\| `(SCSA_\w+)`", text.split("## Environment variables")[1].split("\n## ")[0], re.M))
    for name in sorted(read - listed):
        fail(f"{name} is read by the code and not in docs/reference.md")
    for name in sorted(listed - read):
        fail(f"{name} is in docs/reference.md and read by no code")


def documented_commands(text):
    """Lines of code blocks, fenced or indented, that start scsa."""
    text = text.replace("\\\n", " ")
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.S | re.M) + re.findall(r"^    (\S.*)$", text, re.M)
    for line in "\n".join(blocks).split("\n"):
        match = re.match(r"\s*(?:\w+\(\) \{ |[A-Z_]+=\S* )*(?:\S*/bin/)?(scsa (?!\d)[a-z-].*)", line)
        if match:
            yield re.split(r"\s{2,}\(|[;|<>]", match[1])[0]


def check_command(place, command, commands):
    words = shlex.split(command, comments=True)
    own = words[: words.index("--")] if "--" in words else words
    name = "scsa"
    options = {"--version", "--help", "-h", "--generate"}
    for word in own[1:]:
        if f"{name} {word}" in commands:
            name += f" {word}"
            options = {"--help", "-h"} | {each for names, _, _ in commands[name] for each in names}
        elif word.startswith("-") and not re.match(r"-\d", word):
            if word.split("=")[0] not in options:
                fail(f"{place}: {name} has no option {word}: {command}")
        elif name in ("scsa", "scsa bench"):
            fail(f"{place}: {name} has no command {word}: {command}")


def anchors(text):
    for title in re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M), re.M):
        yield re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def check_links(path, text):
    text = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        if not there.exists():
            fail(f"{path.name}: no such file: {target}")
        elif anchor and anchor not in set(anchors(there.read_text())):
            fail(f"{path.name}: no such heading: {target}")


def main():
    source, scsa = pathlib.Path(sys.argv[1]).resolve(), sys.argv[2]
    commands = read_options(scsa)
    if len(commands) < 8 or not all(commands[name] for name in ("scsa run", "scsa exec")):
        fail(f"the manual page lists only: {sorted(commands)}")
    check_reference(source, commands, "--write" in sys.argv[3:])
    seen = 0
    for path in sorted([source / "README.md", *(source / "docs").glob("*.md")]):
        text = path.read_text()
        check_links(path, text)
        for command in documented_commands(text):
            check_command(path.name, command, commands)
            seen += 1
    if seen < 20:
        fail(f"found only {seen} commands in the documents")
    print("\n".join(failures) or f"{seen} commands, {len(commands)} sections of options")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
