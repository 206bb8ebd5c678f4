// From the words of the command line to Options, by getopt_long and the table of flags; and --help.
#pragma once

#include <getopt.h>

#include <algorithm>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "xmod/flags.h"
#include "xmod/options.h"

namespace xmod {

namespace detail {

// ---------------------------------------------------------------------------------------------------
// --help

inline std::string usage_line(Command command) {
  switch (command) {
    case Command::train:
      return "[train] --train-data GLOB (--steps N | --compute FLOPS) [options]";
    case Command::plan:
      return "plan [options]";
    case Command::eval:
      return "eval --checkpoint DIR (--val-data GLOB | --tasks FILE...) [options]";
    case Command::generate:
      return "generate --checkpoint DIR [options]";
    case Command::routing:
      return "routing --checkpoint DIR --val-data GLOB [options]";
  }
  return "";
}

inline std::string summary(Command command) {
  switch (command) {
    case Command::train:
      return "Trains a model on token shards; writes checkpoints and metrics.csv.";
    case Command::plan:
      return "Counts a model's layers, parameters, FLOPs and memory; trains nothing.";
    case Command::eval:
      return "Measures a checkpoint's validation loss under top-k and threshold routing, and its scores on "
             "tasks.";
    case Command::generate:
      return "Writes text with a checkpoint, under threshold routing.";
    case Command::routing:
      return "Measures which tokens a checkpoint's sparse layers select.";
  }
  return "";
}

inline std::string spelling(const Flag& flag) {
  return "--" + flag.name + (flag.metavar.empty() ? "" : " " + flag.metavar);
}

// left in its column, then text in lines of at most `width` from column `indent` on.
inline std::string two_columns(const std::string& left, const std::string& text, size_t indent,
                               size_t width) {
  std::string out, line = left + std::string(left.size() < indent ? indent - left.size() : 1, ' ');
  bool first = true;
  std::istringstream words(text);
  for (std::string word; words >> word; first = false) {
    if (!first && line.size() + 1 + word.size() > width) {
      out += line + "\n";
      line = std::string(indent, ' ');
      first = true;
    }
    line += (first ? "" : " ") + word;
  }
  return out + line + "\n";
}

inline std::string help_page(const std::string& program, Command command, const std::vector<Flag>& table) {
  constexpr size_t kIndent = 27, kWidth = 100;
  std::string page = "usage: " + program + " " + usage_line(command) + "\n\n" + summary(command) + "\n";
  if (command == Command::train) {
    page += "\nCommands (" + program + " COMMAND --help for their options)\n";
    for (const auto& [name, other] : names_of(command)) {
      page += two_columns("  " + name, summary(other), kIndent, kWidth);
    }
  }
  std::string group;
  for (const Flag& flag : table) {
    if (!of_command(flag, command)) continue;
    if (flag.group != group) page += "\n" + flag.group + "\n";
    group = flag.group;
    const std::string value = flag.default_text.empty() ? "" : " (default: " + flag.default_text + ")";
    page += two_columns("  " + spelling(flag), flag.help + value, kIndent, kWidth);
  }
  return page;
}

// ---------------------------------------------------------------------------------------------------
// From words to options

inline bool has_flag(const std::vector<Flag>& table, const std::string& name) {
  return std::any_of(table.begin(), table.end(), [&](const Flag& flag) { return flag.name == name; });
}

// A flag as it was given.
struct Given {
  const Flag* flag;
  std::string value;
};

// A flag that the table lacks because the program for the other processor has it.
inline void refuse_flag_of_other_program(const std::string& word, const std::string& name,
                                         const std::vector<Flag>& table) {
  if (has_flag(table, name)) return;
  for (const Flag& flag : flag_table()) {
    if (flag.name != name) continue;
    const Processor other = *flag.processor == Processor::cpu ? Processor::gpu : Processor::cpu;
    usage_error(word, " is an option of ", program_on(*flag.processor), ", not of ", program_on(other),
                "; leave it out");
  }
}

// What getopt_long could not place.
[[noreturn]] inline void unknown_option(std::string word, const std::string& program, Command command,
                                        const std::vector<Flag>& table) {
  word = word.substr(0, word.find('='));
  const std::string name = word.substr(std::min<size_t>(2, word.size()));  // behind the dashes
  refuse_flag_of_other_program(word, name, table);
  std::vector<std::string> names, beginnings, commands;
  for (const Flag& flag : table) {
    if (flag.name == name) {
      for (Command other : flag.commands) commands.push_back(name_of(other));
    }
    if (!of_command(flag, command)) continue;
    names.push_back(flag.name);
    if (!name.empty() && flag.name.compare(0, name.size(), name) == 0) beginnings.push_back("--" + flag.name);
  }
  if (!commands.empty()) {
    usage_error(word, " is an option of ", join(commands, " and "), ", not of ", name_of(command));
  }
  if (beginnings.size() > 1) usage_error(word, " is ambiguous: ", join(beginnings));
  usage_error("unknown option ", show_word(word), suggestion(name, names, "--"), " (", program, " ",
              name_of(command), " --help lists them)");
}

[[noreturn]] inline void unexpected_word(const std::string& word, const std::string& program) {
  for (const std::string& name : all_names<Command>()) {
    if (word == name) usage_error("the command comes first: ", program, " ", name, " [options]");
  }
  usage_error("unexpected argument ", show_word(word),
              "; put quotes around a glob and around text with spaces");
}

// The command, if the first word is not an option; removes it from the words.
inline Command take_command(std::vector<char*>& words) {
  if (words.size() < 2 || words[1][0] == '-') return Command::train;
  const std::string word = words[1];
  words.erase(words.begin() + 1);
  for (const auto& [name, command] : names_of(Command{})) {
    if (name == word) return command;
  }
  const std::vector<std::string> valid = all_names<Command>();
  usage_error("unknown command ", show_word(word), suggestion(word, valid),
              " (commands: ", join(valid, " and "), ")");
}

// Runs getopt_long, which also takes --name=value and unambiguous beginnings of names.
inline std::vector<Given> read_flags(std::vector<char*> words, const std::string& program, Command command,
                                     const std::vector<Flag>& table) {
  constexpr int kFirst = 1000;  // codes of long options, above every short one
  std::vector<option> long_options;
  for (size_t i = 0; i < table.size(); i++) {
    if (!of_command(table[i], command)) continue;
    const int takes_value = table[i].metavar.empty() ? no_argument : required_argument;
    long_options.push_back({table[i].name.c_str(), takes_value, nullptr, kFirst + static_cast<int>(i)});
  }
  long_options.push_back({});

  std::vector<Given> given;
  const int count = static_cast<int>(words.size());
  words.push_back(nullptr);
  opterr = 0;
  optind = 0;  // start afresh
  for (int code; (code = getopt_long(count, words.data(), "-:h", long_options.data(), nullptr)) != -1;) {
    char* const last_word = words[static_cast<size_t>(optind - 1)];
    const bool complaint = code == '?' || code == ':';
    const int about = complaint ? optopt : code;
    if (code == 1 && !given.empty() && given.back().flag->many) {
      given.push_back({given.back().flag, optarg});
      continue;
    }
    if (code == 1) unexpected_word(optarg, program);
    if (about == 0) unknown_option(last_word, program, command, table);
    if (about < kFirst && about != 'h') {
      usage_error("unknown option -", static_cast<char>(about), "; options begin with two dashes");
    }
    const Flag& flag = about == 'h' ? table.back() /* --help */ : table[static_cast<size_t>(about - kFirst)];
    if (code == '?') usage_error("--", flag.name, " takes no value");
    if (code == ':') usage_error("--", flag.name, " needs a value: ", spelling(flag));
    const std::string value = optarg ? optarg : "";
    if (optarg == last_word && value.compare(0, 2, "--") == 0) {
      usage_error("--", flag.name, " needs a value: ", spelling(flag), "; found ", show_word(value),
                  ", use --", flag.name, "=... for a value that begins with dashes");
    }
    given.push_back({&flag, value});
  }
  if (optind < count) unexpected_word(words[static_cast<size_t>(optind)], program);  // behind a bare --
  return given;
}

inline bool is_given(const std::vector<Given>& given, const std::string& name) {
  return std::any_of(given.begin(), given.end(), [&](const Given& g) { return g.flag->name == name; });
}

inline void apply(Options& options, const std::vector<Given>& given, Stage stage) {
  for (const Given& g : given) {
    if (g.flag->stage == stage) g.flag->set(options, g.value);
  }
}

inline void check_exclusions(const std::vector<Given>& given) {
  for (const Given& g : given) {
    if (g.flag->excludes.empty() || !is_given(given, g.flag->excludes)) continue;
    usage_error("--", g.flag->name, " and --", g.flag->excludes, " exclude each other, give one of them");
  }
}

inline void check_architecture(const std::vector<Given>& given, Arch arch) {
  for (const Given& g : given) {
    if (g.flag->belongs_to == nullptr || g.flag->belongs_to(arch)) continue;
    std::vector<std::string> owners;
    for (const auto& [name, other] : arch_names()) {
      if (g.flag->belongs_to(other)) owners.push_back(name);
    }
    usage_error("--", g.flag->name, " does not belong to --arch ", arch_name(arch), "; it is an option of ",
                join(owners, " and "));
  }
}

inline void check_required_of_eval(const std::vector<Given>& given) {
  const bool tasks = is_given(given, "tasks");
  if (!tasks && !is_given(given, "val-data")) {
    usage_error("eval needs --val-data GLOB or --tasks FILE...: what to measure");
  }
  for (const char* name : {"max-items", "per-item"}) {
    if (is_given(given, name) && !tasks) usage_error("--", name, " needs --tasks FILE...");
  }
}

inline void check_required_of_plan(const std::vector<Given>& given) {
  if (is_given(given, "ranks")) return;
  for (const char* name :
       {"zero", "grad-accum", "total-batch-tokens", "bandwidth", "device-flops", "device-memory"}) {
    if (is_given(given, name)) usage_error("--", name, " needs --ranks R: for how many processes to plan");
  }
}

inline void check_required(const std::vector<Given>& given, const Options& o,
                           const std::vector<Flag>& table) {
  const bool model = has_model(o.command);
  for (const Flag& flag : table) {
    if (!flag.required || !of_command(flag, o.command) || is_given(given, flag.name)) continue;
    if (flag.belongs_to == nullptr)
      usage_error(name_of(o.command), " needs ", spelling(flag), ": ", flag.help);
    if (model && o.train.init_from.empty() && flag.belongs_to(o.model.arch)) {
      usage_error("--arch ", arch_name(o.model.arch), " needs ", spelling(flag), ": ", flag.help);
    }
  }
  if (o.command == Command::train && !is_given(given, "steps") && !is_given(given, "compute")) {
    usage_error("train needs --steps N or --compute FLOPS: how long to train");
  }
  if (o.command == Command::plan) check_required_of_plan(given);
  if (o.command == Command::eval) check_required_of_eval(given);
}

inline void check_values(const Options& o) {
  if (!o.routing.csv.empty() && o.routing.csv == o.routing.map) {
    usage_error("--csv and --map are both ", show_word(o.routing.csv), ": give two files");
  }
  if (!has_model(o.command)) return;
  validate(o.model);
  validate_size(o.model, o.command == Command::train ? o.train.batch_size : o.plan.batch_size);
}

}  // namespace detail

// Reads `program [command] [options]`. Throws usage errors; prints nothing.
inline Options parse_options(int argc, char** argv, Processor processor = Processor::cpu) {
  std::vector<char*> words(argv, argv + argc);
  const std::string path = argc > 0 ? argv[0] : "train_xmod";
  const std::string program = path.substr(path.rfind('/') + 1);
  const std::vector<detail::Flag> table = detail::flag_table(processor);

  Options options;
  options.command = detail::take_command(words);
  const auto given = detail::read_flags(words, program, options.command, table);
  if (detail::is_given(given, "help")) {
    options.help = true;
    options.help_text = detail::help_page(program, options.command, table);
    return options;
  }
  detail::check_exclusions(given);
  detail::apply(options, given, detail::Stage::preset);
  detail::apply(options, given, detail::Stage::value);
  detail::check_architecture(given, options.model.arch);
  if (options.train.init_from.empty()) set_derived_defaults(options.model);
  detail::apply(options, given, detail::Stage::derived);
  detail::check_required(given, options, table);
  detail::check_values(options);
  return options;
}

}  // namespace xmod
