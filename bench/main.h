// What the benchmarks' command lines have in common.
#pragma once

#include <getopt.h>

#include <algorithm>
#include <iostream>
#include <new>
#include <string>
#include <vector>

#include "xmod/error.h"
#include "xmod/flag_values.h"

namespace xmod::bench {

// Calls visit(code, value) for every option of the table, whose codes are letters.
template <class Visit>
void parse_arguments(const std::string& program, int argc, char** argv, std::vector<option> table,
                     Visit visit) {
  table.push_back({});
  opterr = 0;  // we speak ourselves
  for (int code; (code = getopt_long(argc, argv, ":", table.data(), nullptr)) != -1;) {
    const std::string word = xmod::detail::show_word(argv[std::max(1, optind - 1)]);
    if (code == ':') usage_error(word, " needs a value; see ", program, " --help");
    if (code == '?')
      usage_error("unknown or ambiguous option ", word, ", or one that takes no value; see ", program,
                  " --help");
    visit(code, std::string(optarg ? optarg : ""));
  }
  if (optind < argc) usage_error("unexpected argument ", argv[optind], "; see ", program, " --help");
}

// Runs measure(), and returns the program's status; an error is one line.
template <class Measure>
int run_benchmark(Measure measure) {
  try {
    measure();
    return 0;
  } catch (const xmod::Error& error) {
    std::cerr << "error: " << error.what() << "\n";
    return error.exit_code;
  } catch (const std::bad_alloc&) {
    std::cerr << "error: not enough memory; a smaller --batch-size or --size may fit\n";
    return 1;
  }
}

}  // namespace xmod::bench
