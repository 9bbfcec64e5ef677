// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

namespace scsa::tool {

// What a gnuplot script draws, as the text of one SVG element that scales with the page. The script holds neither
// terminal nor output. `name` sets the identifiers in it apart from those of other drawings of the page.
// ToolError where gnuplot is not installed, or rejects the script.
std::string DrawSvg(std::string_view name, std::string_view script);

// A text in quotes for a script. What gnuplot or SVG could take for more than text becomes a blank.
std::string GnuplotText(std::string_view text);

}  // namespace scsa::tool
