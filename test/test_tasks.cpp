// Evaluation files and the scores on them.
#include "xmod/tasks.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <memory>

#include "small_models.h"
#include "xmod/command_line.h"
#include "xmod/generate.h"
#include "xmod/task_report.h"

namespace xmod {
namespace {

constexpr int64_t kVocabulary = 61;  // of small_config

// ---------------------------------------------------------------------------------------------------
// Files in the making

// A file's numbers, to be changed before they are written.
struct Draft {
  int64_t width = 2;
  std::vector<uint32_t> header = std::vector<uint32_t>(256);
  std::vector<uint32_t> numbers;  // behind the header

  std::string write(const std::string& name = "draft.bin") const {
    const std::string path = ::testing::TempDir() + "/" + name;
    std::string bytes;
    auto put = [&](uint32_t number, int64_t size) {
      for (int64_t i = 0; i < size; i++) bytes += static_cast<char>(number >> (8 * i));
    };
    for (uint32_t field : header) put(field, 4);
    for (uint32_t number : numbers) put(number, width);
    std::ofstream(path, std::ios::binary) << bytes;
    return path;
  }
};

void append_tokens(std::vector<uint32_t>& numbers, const Ints& tokens) {
  numbers.push_back(static_cast<uint32_t>(tokens.size()));
  numbers.insert(numbers.end(), tokens.begin(), tokens.end());
}

Draft draft_of(Task task, const std::vector<TaskItem>& items, bool lengths, int64_t width = 2) {
  Draft draft;
  draft.width = width;
  draft.header[0] = 20240522;
  draft.header[1] = width == 2 ? 1 : 2;
  draft.header[2] = static_cast<uint32_t>(items.size());
  draft.header[4] = static_cast<uint32_t>(task);
  draft.header[7] = lengths;
  for (size_t i = 0; i < items.size(); i++) {
    std::vector<uint32_t> item = {width == 2 ? 0xffffu : 0xffffffffu, 0, static_cast<uint32_t>(i),
                                  static_cast<uint32_t>(items[i].gold),
                                  static_cast<uint32_t>(items[i].choices.size())};
    append_tokens(item, items[i].context);
    for (const TaskChoice& choice : items[i].choices) append_tokens(item, choice.tokens);
    item[1] = static_cast<uint32_t>(width * static_cast<int64_t>(item.size()));
    append(draft.numbers, item);
  }
  for (const TaskItem& item : items) {
    for (const TaskChoice& choice : item.choices) {
      if (lengths) draft.numbers.push_back(static_cast<uint32_t>(choice.length));
    }
  }
  return draft;
}

const std::vector<TaskItem> kItems = {
    {{1, 2, 3}, {{{4}, 7}, {{5, 6}, 2}, {{60}, 3}}, 2},
    {{9}, {{{8, 7, 6}, 12}, {{5}, 1}}, 0},
};

TaskFile read(const Draft& draft, const std::string& name = "draft.bin") {
  return TaskFileReader(draft.write(name)).read_items(kVocabulary);
}

void expect_equal(const std::vector<TaskItem>& found, const std::vector<TaskItem>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); i++) {
    EXPECT_EQ(found[i].context, expected[i].context);
    EXPECT_EQ(found[i].gold, expected[i].gold);
    ASSERT_EQ(found[i].choices.size(), expected[i].choices.size());
    for (size_t c = 0; c < found[i].choices.size(); c++) {
      EXPECT_EQ(found[i].choices[c].tokens, expected[i].choices[c].tokens);
      EXPECT_EQ(found[i].choices[c].length, expected[i].choices[c].length);
    }
  }
}

template <class Function>
void expect_error(const std::vector<std::string>& parts, Function function) {
  try {
    function();
    ADD_FAILURE() << "no error, expected one about " << parts[0];
  } catch (const Error& error) {
    for (const std::string& part : parts) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos)
          << error.what() << "\nwithout: " << part;
    }
  }
}

// ---------------------------------------------------------------------------------------------------
// Reading

TEST(TaskFiles, HoldItemsInNumbersOfBothWidths) {
  for (int64_t width : {2, 4}) {
    const TaskFile file = read(draft_of(Task::arc_challenge, kItems, true, width));
    EXPECT_EQ(file.name, "arc-challenge");
    EXPECT_TRUE(file.lengths_in_bytes);
    EXPECT_EQ(file.num_choices(), 5);
    expect_equal(file.items, kItems);
  }
}

TEST(TaskFiles, OfLlmcHaveNoTaskAndNoByteLengths) {
  const TaskFile file = read(draft_of(Task::unnamed, kItems, false), "hellaswag_val.bin");
  EXPECT_EQ(file.name, "hellaswag_val");
  EXPECT_FALSE(file.lengths_in_bytes);
  std::vector<TaskItem> expected = kItems;
  for (TaskItem& item : expected) {
    for (TaskChoice& choice : item.choices) choice.length = static_cast<int64_t>(choice.tokens.size());
  }
  expect_equal(file.items, expected);
}

TEST(TaskFiles, LargeIdsNeedFourBytes) {
  std::vector<TaskItem> items = kItems;
  items[0].context[1] = 151935;
  const Draft draft = draft_of(Task::piqa, items, true, 4);
  EXPECT_EQ(TaskFileReader(draft.write()).read_items(151936).items[0].context[1], 151935);
  expect_error({"item 0", "151935", "vocabulary size 151935", "--tokenizer-dir"},
               [&] { TaskFileReader(draft.write()).read_items(151935); });
}

TEST(TaskFiles, KnowTheirTokenizer) {
  const Tokenizer bytes = Tokenizer::bytes();
  EXPECT_EQ(fingerprint(bytes), 0x8eb76421eb763225u);  // that of prepare_eval.py
  Draft draft = draft_of(Task::piqa, kItems, true);
  EXPECT_EQ(TaskFileReader(draft.write()).tokenizer_fingerprint(), 0u);
  draft.header[5] = static_cast<uint32_t>(fingerprint(bytes));
  draft.header[6] = static_cast<uint32_t>(fingerprint(bytes) >> 32);
  TaskFileReader(draft.write()).require_tokenizer(bytes);
  draft.header[6] ^= 1;
  expect_error({"draft.bin", "another tokenizer", "--tokenizer-dir CHECKPOINT"},
               [&] { TaskFileReader(draft.write()).require_tokenizer(bytes); });
}

TEST(TaskFiles, BadNumbersAreNamed) {
  struct Case {
    std::string what;
    std::function<void(Draft&)> spoil;
    std::vector<std::string> parts;
  };
  // numbers: mark, bytes, index, gold, choices, context's size, ...
  const std::vector<Case> cases = {
      {"magic", [](Draft& d) { d.header[0] = 20240520; }, {"magic number 20240520", "expected 20240522"}},
      {"version", [](Draft& d) { d.header[1] = 3; }, {"version 3", "1 (uint16) or 2 (uint32)"}},
      {"wrong width", [](Draft& d) { d.header[1] = 2; }, {"item 0", "mark"}},
      {"no items", [](Draft& d) { d.header[2] = 0; }, {"0 items"}},
      {"negative items", [](Draft& d) { d.header[2] = 0xffffffff; }, {"-1 items"}},
      {"more items", [](Draft& d) { d.header[2] = 3; }, {"item 2", "mark"}},
      {"fewer items", [](Draft& d) { d.header[2] = 1; }, {"over-long"}},
      {"task", [](Draft& d) { d.header[4] = 7; }, {"task number 7", "expected 0 to 6"}},
      {"lengths", [](Draft& d) { d.header[7] = 2; }, {"field 7 is 2"}},
      {"lengths that are not there", [](Draft& d) { d.numbers.pop_back(); }, {"truncated", "item 1"}},
      {"lengths that are not announced", [](Draft& d) { d.header[7] = 0; }, {"over-long"}},
      {"a length of 0", [](Draft& d) { d.numbers.back() = 0; }, {"item 1", "0 bytes"}},
      {"mark", [](Draft& d) { d.numbers[0] = 1; }, {"item 0", "mark 65535"}},
      {"bytes", [](Draft& d) { d.numbers[1] += 2; }, {"item 0", "says that they are"}},
      {"gold", [](Draft& d) { d.numbers[3] = 3; }, {"item 0", "right one is number 3"}},
      {"choices", [](Draft& d) { d.numbers[4] = 1; }, {"item 0", "1 choices, expected 2 or more"}},
      {"context", [](Draft& d) { d.numbers[5] = 0; }, {"item 0", "empty context"}},
      {"choice", [](Draft& d) { d.numbers[9] = 0; }, {"item 0", "empty choice"}},
      {"id", [](Draft& d) { d.numbers[6] = 61; }, {"item 0", "id 61", "vocabulary size 61"}},
      {"lambada", [](Draft& d) { d.header[4] = 5; }, {"item 0", "3 choices, expected 1"}},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.what);
    Draft draft = draft_of(Task::hellaswag, kItems, true);
    c.spoil(draft);
    std::vector<std::string> parts = c.parts;
    parts.push_back("draft.bin: ");
    parts.push_back("prepare_eval.py");
    expect_error(parts, [&] { read(draft); });
  }
}

TEST(TaskFiles, NoOtherLengthIsTaken) {
  const std::string path = draft_of(Task::hellaswag, kItems, true).write();
  const auto size = std::filesystem::file_size(path);
  for (auto bytes = size + 4; bytes-- > 0;) {
    if (bytes == size) continue;
    draft_of(Task::hellaswag, kItems, true).write();
    std::filesystem::resize_file(path, bytes);
    EXPECT_THROW(TaskFileReader(path).read_items(kVocabulary), Error) << bytes << " bytes";
  }
}

// Whatever a number becomes, the file is read or refused.
TEST(TaskFiles, NoNumberBreaksTheReader) {
  for (size_t i = 0; i < draft_of(Task::hellaswag, kItems, true, 4).numbers.size(); i++) {
    for (uint32_t value : {0u, 1u, 3u, 60u, 61u, 0x7fffffffu, 0x80000000u, 0xffffffffu}) {
      Draft draft = draft_of(Task::hellaswag, kItems, true, 4);
      draft.numbers[i] = value;
      try {
        read(draft);
      } catch (const Error&) {
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------------
// Flags

EvalOptions parse_eval(std::vector<std::string> words) {
  words.insert(words.begin(), {"train_xmod", "eval", "--checkpoint", "c"});
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  return parse_options(static_cast<int>(argv.size()), argv.data()).eval;
}

TEST(EvalFlags, TasksTakesEveryFileUpToTheNextFlag) {
  using Words = std::vector<std::string>;
  const EvalOptions o =
      parse_eval({"--tasks", "a.bin", "b.bin", "--json", "--max-items", "200", "--per-item", "p"});
  EXPECT_EQ(o.tasks, (Words{"a.bin", "b.bin"}));
  EXPECT_EQ(o.max_items, 200);
  EXPECT_EQ(o.per_item, "p");
  EXPECT_TRUE(o.json && o.val_data.empty());
  EXPECT_EQ(parse_eval({"--tasks=a.bin", "b.bin", "--tasks", "c.bin"}).tasks,
            (Words{"a.bin", "b.bin", "c.bin"}));
  EXPECT_EQ(parse_eval({"--val-data", "v", "--tasks", "a.bin"}).val_data, "v");
}

TEST(EvalFlags, SomethingMustBeMeasured) {
  expect_error({"eval needs --val-data GLOB or --tasks FILE..."}, [] { parse_eval({}); });
  expect_error({"--tasks needs a value: --tasks FILE..."}, [] { parse_eval({"--tasks"}); });
  expect_error({"--tasks needs a value"}, [] { parse_eval({"--tasks", "--json"}); });
  expect_error({"unexpected argument b.bin"}, [] { parse_eval({"--tasks", "a.bin", "--json", "b.bin"}); });
  for (const std::string flag : {"--max-items", "--per-item"}) {
    expect_error({flag + " needs --tasks FILE..."}, [&] { parse_eval({"--val-data", "v", flag, "1"}); });
  }
}

// ---------------------------------------------------------------------------------------------------
// Windows

TEST(Windows, ScoreEachTokenOfAChoiceOnceWithAsMuchContextAsFits) {
  for (int64_t T = 1; T <= 6; T++) {
    for (int64_t context = 1; context <= 8; context++) {
      for (int64_t choice = 1; choice <= 14; choice++) {
        int64_t next = context;  // the token that is to be scored next
        for (const Window& w : windows_of(0, 0, context, choice, T)) {
          const int64_t end = w.first + w.length + 1;  // behind the last target
          EXPECT_EQ(end - w.scored, next);
          EXPECT_GE(w.first, 0);
          EXPECT_LE(w.scored, w.length);
          EXPECT_EQ(w.length, std::min(T, end - 1));
          next = end;
        }
        EXPECT_EQ(next, context + choice);
        EXPECT_EQ(windows_of(0, 0, context, choice, T).size(), static_cast<size_t>((choice + T - 1) / T));
      }
    }
  }
}

TEST(Windows, CutContextsAreCountedByItem) {
  const TaskFile file{.items = {{{1, 2, 3}, {{{4}, 1}, {{5, 6}, 1}}}, {{1}, {{{2}, 1}, {{3}, 1}}}}};
  EXPECT_EQ(count_cut(file, 2, 4), 0);  // 3 + 2 tokens are 4 inputs and targets
  EXPECT_EQ(count_cut(file, 2, 3), 1);
  EXPECT_EQ(count_cut(file, 1, 1), 1);
  EXPECT_EQ(count_cut(file, 2, 1), 1);
}

// ---------------------------------------------------------------------------------------------------
// Log-likelihoods

std::vector<TaskItem> random_items(const ModelConfig& c, size_t count, uint64_t seed) {
  // Some fit easily, some hardly, some only without the beginning; one choice is longer than the context.
  const std::vector<int64_t> contexts = {1, 5, c.seq_len - 2, 3 * c.seq_len},
                             choices = {1, 3, 7, c.seq_len + 5};
  std::vector<TaskItem> items;
  for (size_t i = 0; i < count; i++) {
    const uint64_t word = philox(seed, stream_of("items"), i)[0];
    TaskItem item{random_ids(contexts[word % 4], c.vocab_size, seed + 10 * i), {}, 0};
    for (size_t j = 0; j < 2 + i % 3; j++) {
      const int64_t size = choices[(word >> 4) * (j + 1) % 4];
      item.choices.push_back({random_ids(size, c.vocab_size, seed + 10 * i + j + 1), size});
    }
    items.push_back(item);
  }
  return items;
}

// One token at a time: the last row of the logits of what stands before it.
ChoiceScore plain_score(TestModel& model, const TaskItem& item, const TaskChoice& choice) {
  const int64_t T = model.config.seq_len;
  Ints tokens = item.context;
  ChoiceScore score;
  for (int64_t begin = 0; begin < static_cast<int64_t>(choice.tokens.size()); begin += T) {
    const int64_t size = std::min(T, static_cast<int64_t>(choice.tokens.size()) - begin);
    const int64_t all = static_cast<int64_t>(tokens.size()) + size;
    Ints seen(tokens.begin() + std::max<int64_t>(0, all - 1 - T), tokens.end());
    for (int64_t i = begin; i < begin + size; i++) {
      Floats row(static_cast<size_t>(model.config.vocab_size));
      const int64_t n = static_cast<int64_t>(seen.size());
      model.logits(row.data(), seen.data(), n, n - 1, 1, Routing::threshold);
      double sum = 0;
      for (float logit : row) sum += std::exp(static_cast<double>(logit));
      const int32_t target = choice.tokens[static_cast<size_t>(i)];
      score.loglikelihood += static_cast<double>(row[target]) - std::log(sum);
      score.greedy = score.greedy && std::max_element(row.begin(), row.end()) - row.begin() == target;
      seen.push_back(target);
      tokens.push_back(target);
    }
  }
  return score;
}

class TaskScoring : public ::testing::TestWithParam<const char*> {
 protected:
  TaskScoring() : config_(config_named(GetParam())), trained_(be_, config_, 4, Use::training) {
    randomise(trained_);
    learn_thresholds(trained_, random_batch(config_, 4));
  }

  // The same weights, for batches of another size.
  std::unique_ptr<TestModel> model(int64_t max_batch) {
    auto copy = std::make_unique<TestModel>(be_, config_, max_batch, Use::inference);
    const Floats weights = download(be_, trained_.params(), trained_.table.total);
    const Floats buffers = download(be_, trained_.buffers(), trained_.table.buffers_total);
    be_.to_device(copy->params(), weights.data(), trained_.table.total);
    be_.to_device(copy->buffers(), buffers.data(), trained_.table.buffers_total);
    return copy;
  }

  TestBackend be_{{.threads = 1}};
  ModelConfig config_;
  TestModel trained_;
};

INSTANTIATE_TEST_SUITE_P(Architectures, TaskScoring,
                         ::testing::Values("dense", "xmod", "selected_q", "routed_ffn", "moe"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(TaskScoring, AreThoseOfOneTokenAfterTheOtherWhateverTheBatchSize) {
  const TaskFile file{.name = "made-up", .items = random_items(config_, 12, 3)};
  for (int64_t B : {1, 3, 64}) {
    const auto scorer = model(B);
    int64_t reported = 0, all = 0;
    const TaskScores scores = evaluate_task(*scorer, file, 0, [&](int64_t done, int64_t of) {
      EXPECT_GT(done, reported);
      reported = done, all = of;
    });
    EXPECT_EQ(reported, all);
    ASSERT_EQ(scores.items.size(), file.items.size());
    for (size_t i = 0; i < file.items.size(); i++) {
      for (size_t c = 0; c < file.items[i].choices.size(); c++) {
        const ChoiceScore plain = plain_score(trained_, file.items[i], file.items[i].choices[c]);
        EXPECT_NEAR(scores.items[i][c].loglikelihood, plain.loglikelihood, 1e-5 * -plain.loglikelihood);
      }
    }
  }
}

TEST_P(TaskScoring, LambadaWantsTheMostProbableTokens) {
  TaskFile file{.task = Task::lambada};
  for (uint64_t i = 0; i < 8; i++) {  // the greedy word, of which half have one wrong token
    TaskItem item{random_ids(6, config_.vocab_size, i), {{{}, 1}}, 0};
    Generation<TestBackend>(trained_, {item.context}, {.temperature = 0}, 1, -1)
        .run(3, [&](size_t, int32_t id) { item.choices[0].tokens.push_back(id); });
    if (i % 2) item.choices[0].tokens[i % 3] = (item.choices[0].tokens[i % 3] + 1) % 61;
    file.items.push_back(item);
  }
  const TaskScores scores = evaluate_task(*model(3), file, 0, [](int64_t, int64_t) {});
  double sum = 0;
  for (size_t i = 0; i < 8; i++) {
    EXPECT_EQ(scores.items[i][0].greedy, i % 2 == 0) << i;
    sum += plain_score(trained_, file.items[i], file.items[i].choices[0]).loglikelihood;
  }
  EXPECT_EQ(scores.acc.value, 0.5);
  EXPECT_FALSE(scores.acc_norm);
  ASSERT_TRUE(scores.perplexity);
  EXPECT_NEAR(scores.perplexity->value / std::exp(-sum / 8), 1, 1e-4);
}

TEST_P(TaskScoring, OfTheFirstItemsOnly) {
  const TaskFile file{.name = "made-up", .items = random_items(config_, 6, 3)};
  const TaskScores all = evaluate_task(*model(4), file, 0, [](int64_t, int64_t) {});
  const TaskScores few = evaluate_task(*model(4), file, 2, [](int64_t, int64_t) {});
  const TaskScores more = evaluate_task(*model(4), file, 1000, [](int64_t, int64_t) {});
  EXPECT_EQ(few.items.size(), 2u);
  EXPECT_EQ(more.items.size(), 6u);
  for (size_t i = 0; i < 2; i++)
    EXPECT_NEAR(few.items[i][0].loglikelihood, all.items[i][0].loglikelihood, 1e-3);
}

TEST_P(TaskScoring, RefuseLogitsThatAreNotNumbers) {
  const auto broken = model(2);
  set_all(*broken, Init::embedding, std::numeric_limits<float>::infinity());
  expect_error({"not finite", "earlier checkpoint"}, [&] {
    evaluate_task(*broken, TaskFile{.items = random_items(config_, 2, 3)}, 0, [](int64_t, int64_t) {});
  });
}

// ---------------------------------------------------------------------------------------------------
// Accuracies

TEST(Accuracy, TakesTheLargestSumOrTheLargestPerByteAndTheFirstOfEqualOnes) {
  const TaskItem item{{1}, {{{1}, 2}, {{1}, 10}, {{1}, 2}}, 0};
  const ItemScore score = {{-4, false}, {-10, false}, {-4, false}};
  EXPECT_EQ(best_choice(item, score, false), 0u);
  EXPECT_EQ(best_choice(item, score, true), 1u);
  EXPECT_EQ(best_choice(item, {{-5, false}, {-4, false}, {-4, false}}, false), 1u);
}

TEST(Accuracy, StandardErrorsAreOfTheSample) {
  const Estimate e = mean_of({1, 0, 0, 1, 1, 1, 0, 1, 1, 1});
  EXPECT_DOUBLE_EQ(e.value, 0.7);
  EXPECT_DOUBLE_EQ(e.error, std::sqrt(0.7 * 0.3 / 9));
  EXPECT_TRUE(std::isnan(mean_of({1}).error));
}

TEST(Accuracy, PerplexityIsPerWord) {
  const Estimate e = perplexity({{{-1, true}}, {{-3, true}}});
  EXPECT_DOUBLE_EQ(e.value, std::exp(2));
  EXPECT_DOUBLE_EQ(e.error, std::exp(2) * 1);  // the sample's deviation is sqrt(2), that of the mean 1
}

// ---------------------------------------------------------------------------------------------------
// The report

TaskReport made_up_report(Task task, double acc, std::optional<double> acc_norm) {
  TaskReport r;
  r.file.task = task;
  r.file.name = task == Task::unnamed ? "hellaswag_val" : traits(task).name;
  r.file.path = r.file.name + ".bin";
  r.file.lengths_in_bytes = task != Task::unnamed;
  r.file.items = {kItems[0]};
  r.scores.items = {{{-1.5, true}, {-0.5, false}, {-3, false}}};
  r.scores.acc = {acc, 0.0123};
  if (acc_norm) r.scores.acc_norm = {*acc_norm, 0.0456};
  if (task == Task::lambada) r.scores.perplexity = {23.4567, 1.25e7};
  r.scores.cut = static_cast<int64_t>(task);
  return r;
}

std::vector<TaskReport> paper_reports() {
  return {made_up_report(Task::unnamed, 0.5, 0.5),     made_up_report(Task::boolq, 0.6031, {}),
          made_up_report(Task::lambada, 0.3049, {}),   made_up_report(Task::piqa, 0.7, 0.7013),
          made_up_report(Task::hellaswag, 0.3, 0.38),  made_up_report(Task::arc_challenge, 0.27, 0.2841),
          made_up_report(Task::arc_easy, 0.61, 0.6431)};
}

TEST(TaskReports, StandInTheColumnsOfThePaper) {
  std::vector<TaskReport> reports = paper_reports();
  reports.erase(reports.begin());
  sort_as_in_the_paper(reports);
  EXPECT_EQ(task_table(reports),
            "                 Hella.    ARC-e    ARC-c     PIQA    LAMB.    BoolQ     Avg.\n"
            "acc               30.00    61.00    27.00    70.00    30.49    60.31    46.47\n"
            "  std. error       1.23     1.23     1.23     1.23     1.23     1.23\n"
            "acc_norm          38.00    64.31    28.41    70.13        -        -    48.61\n"
            "  std. error       4.56     4.56     4.56     4.56        -        -\n"
            "perplexity            -        -        -        -    23.46        -\n"
            "  std. error          -        -        -        - 1.25e+07        -\n"
            "items                 1        1        1        1        1        1\n"
            "contexts cut          1        2        3        4        5        6\n");
}

TEST(TaskReports, OtherTasksFollowAndLeaveNoAverage) {
  std::vector<TaskReport> reports = {paper_reports()[0], paper_reports()[1]};
  reports[1].scores.acc.error = NAN;
  sort_as_in_the_paper(reports);
  EXPECT_EQ(task_table(reports),
            "                  BoolQ  hellaswag_val\n"
            "acc               60.31          50.00\n"
            "  std. error          -           1.23\n"
            "acc_norm              -          50.00\n"
            "  std. error          -           4.56\n"
            "items                 1              1\n"
            "contexts cut          6              0\n"
            "acc_norm of hellaswag_val is normalised by tokens: its file has no byte lengths\n");
}

TEST(TaskReports, AreJson) {
  const nlohmann::json choice = task_json(paper_reports()[0]), lambada = task_json(paper_reports()[2]);
  EXPECT_EQ(choice.dump(),
            R"({"acc":0.5,"acc_norm":0.5,"acc_norm_stderr":0.0456,"acc_stderr":0.0123,"contexts_cut":0,)"
            R"("file":"hellaswag_val.bin","items":1,"normalised_by":"tokens","task":"hellaswag_val"})");
  EXPECT_EQ(lambada.dump(),
            R"({"acc":0.3049,"acc_stderr":0.0123,"contexts_cut":5,"file":"lambada.bin","items":1,)"
            R"("perplexity":23.4567,"perplexity_stderr":12500000.0,"task":"lambada"})");
}

TEST(TaskReports, SayWhatTheModelThinksOfEachItem) {
  EXPECT_EQ(
      item_lines(paper_reports()[0]),
      R"({"task":"hellaswag_val","item":0,"gold":2,"loglikelihoods":[-1.5,-0.5,-3.0],"choice":1,"choice_norm":0})"
      "\n");
  EXPECT_EQ(item_lines(paper_reports()[1]),
            R"({"task":"boolq","item":0,"gold":2,"loglikelihoods":[-1.5,-0.5,-3.0],"choice":1})"
            "\n");
  EXPECT_NE(item_lines(paper_reports()[2]).find(R"("greedy":true})"), std::string::npos);
}

}  // namespace
}  // namespace xmod
