// SPDX-License-Identifier: Apache-2.0
#include "command.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>

namespace scsa::tool {
namespace {

// Output goes to unnamed files: no pipe that could fill up while the other one is read.
using File = std::unique_ptr<std::FILE, int (*)(std::FILE*)>;

std::string Content(std::FILE* file) {
  std::rewind(file);
  std::string text;
  char chunk[4096];
  for (std::size_t n; (n = std::fread(chunk, 1, sizeof(chunk), file)) > 0;) text.append(chunk, n);
  return text;
}

}  // namespace

CommandResult RunCommand(const std::vector<std::string>& argv, const std::vector<std::string>& environment) {
  const File out(std::tmpfile(), &std::fclose);
  const File err(std::tmpfile(), &std::fclose);
  CommandResult result;
  const pid_t child = fork();
  if (child == 0) {
    dup2(open("/dev/null", O_RDONLY), STDIN_FILENO);
    dup2(fileno(out.get()), STDOUT_FILENO);
    dup2(fileno(err.get()), STDERR_FILENO);
    for (const std::string& variable : environment) putenv(const_cast<char*>(variable.c_str()));
    std::vector<char*> arguments;
    for (const std::string& argument : argv) arguments.push_back(const_cast<char*>(argument.c_str()));
    arguments.push_back(nullptr);
    execv(arguments[0], arguments.data());
    _exit(127);
  }
  int status = 0;
  if (child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status)) result.status = WEXITSTATUS(status);
  result.out = Content(out.get());
  result.err = Content(err.get());
  return result;
}

}  // namespace scsa::tool
