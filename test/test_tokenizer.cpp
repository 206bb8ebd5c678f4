// Tokenizer: bytes, BPE by lowest id, the three pre-splits, bad files.
#include "xmod/tokenizer.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>

using namespace xmod;
namespace fs = std::filesystem;
using Strings = std::vector<std::string>;
using Ids = std::vector<int32_t>;

namespace {

Strings pieces(std::string_view text, PreSplit split) {
  Strings found;
  while (!text.empty()) {
    const size_t length = first_piece(text, split);
    if (length == 0 || length > text.size()) return {"piece of length " + std::to_string(length)};
    found.emplace_back(text.substr(0, length));
    text.remove_prefix(length);
  }
  return found;
}

// The 256 bytes, then `merged`.
Strings vocabulary(const Strings& merged) {
  Strings tokens;
  for (int byte = 0; byte < 256; byte++) tokens.emplace_back(1, static_cast<char>(byte));
  tokens.insert(tokens.end(), merged.begin(), merged.end());
  return tokens;
}

std::string tokenizer_file(const Strings& tokens, int32_t eot = -1, int32_t split = 1) {
  std::string bytes;
  for (int32_t field : {20240328, 2, static_cast<int32_t>(tokens.size()), eot, split}) {
    for (int i = 0; i < 4; i++) bytes.push_back(static_cast<char>(static_cast<uint32_t>(field) >> (8 * i)));
  }
  bytes.resize(1024);
  for (const std::string& token : tokens) {
    bytes.push_back(static_cast<char>(token.size()));
    bytes += token;
  }
  return bytes;
}

// BPE as its definition says, one merge at a time.
Ids encode_by_definition(const Strings& tokens, const std::string& piece) {
  const auto id_of = [&](const std::string& token) {
    const auto found = std::find(tokens.begin(), tokens.end(), token);
    return found == tokens.end() ? INT32_MAX : static_cast<int32_t>(found - tokens.begin());
  };
  Strings parts;
  for (char byte : piece) parts.emplace_back(1, byte);
  for (;;) {
    int32_t lowest = INT32_MAX;
    size_t place = 0;
    for (size_t i = 0; i + 1 < parts.size(); i++) {
      const int32_t id = id_of(parts[i] + parts[i + 1]);
      if (id < lowest) lowest = id, place = i;
    }
    if (lowest == INT32_MAX) break;
    parts[place] += parts[place + 1];
    parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(place) + 1);
  }
  Ids ids;
  for (const std::string& part : parts) ids.push_back(id_of(part));
  return ids;
}

class TokenizerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "xmod_tokenizer_XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder = name;
  }
  void TearDown() override { fs::remove_all(folder); }

  std::string path() const { return (folder / "tokenizer.bin").string(); }
  Tokenizer load(const std::string& bytes) const {
    std::ofstream(path(), std::ios::binary) << bytes;
    return Tokenizer::load(path());
  }
  void expect_error(const std::string& bytes, const Strings& parts) const {
    try {
      load(bytes);
      ADD_FAILURE() << "no error, expected one about " << parts[0];
    } catch (const Error& error) {
      const std::string message = error.what();
      EXPECT_EQ(error.exit_code, 1);
      EXPECT_EQ(message.find('\n'), std::string::npos) << message;
      EXPECT_NE(message.find(path()), std::string::npos) << message;
      for (const std::string& part : parts) {
        EXPECT_NE(message.find(part), std::string::npos) << "'" << part << "' is not in: " << message;
      }
    }
  }

  fs::path folder;
};

}  // namespace

// ------------------------------------------------------------------------------------------------- bytes

TEST(ByteTokenizer, ATokenIsAByte) {
  const Tokenizer tokenizer = Tokenizer::bytes();
  EXPECT_EQ(tokenizer.vocab_size(), 256);
  EXPECT_EQ(tokenizer.eot(), -1);
  EXPECT_EQ(tokenizer.encode("Hé\n"), (Ids{'H', 0xC3, 0xA9, '\n'}));
  EXPECT_EQ(tokenizer.encode(""), Ids{});
  std::string all;
  for (int byte = 255; byte >= 0; byte--) all.push_back(static_cast<char>(byte));
  EXPECT_EQ(tokenizer.decode(tokenizer.encode(all)), all);
}

TEST(ByteTokenizer, IdsBeyondTheVocabularyShowAsReplacementCharacters) {
  EXPECT_EQ(Tokenizer::bytes().decode({'a', 256, 'b', -1, 50303}), "a\uFFFDb\uFFFD\uFFFD");
}

// --------------------------------------------------------------------------------------------- pre-split
// The expected pieces are those of the regular expressions that tokenizer.h quotes.

TEST(PreSplit, Gpt2) {
  const std::vector<Strings> expected = {
      {"Hello", " world", ",", " it", "'s", " 2024", "!"},
      {" ", " two", " ", " spaces", "\n\n", "\n", "end", "  "},
      {"I", "'ll", " I", "'", "LL", " '", "season", " x", "'s"},
      {"a", "\n  "},
      {"12345", " 678"},
      {"f", "(", "x", "_", "1", ")!!", "\r\n\r\n ", " y"},
      {"naïve", " Ünïcödé", " привет", " мир"},
      {"日本語", "、", "テスト", "。", "x", "²½"},
      {"e", "\u0301", "t", " नमस", "्", "त", "े"},
      {"a", "\u00a0", "b", "\u3000", "c", "\u2003"},
      {"\t", "\t", "indent", "\t", "x"},
      {"don", "'t", "'"},
      {"👩🏽‍💻", " ok"},
      {"...", "\n", "\n", "A"},
  };
  for (const Strings& split : expected) {
    std::string text;
    for (const std::string& piece : split) text += piece;
    EXPECT_EQ(pieces(text, PreSplit::gpt2), split);
  }
}

TEST(PreSplit, Cl100k) {
  const std::vector<Strings> expected = {
      {"Hello", " world", ",", " it", "'s", " ", "202", "4", "!"},
      {" ", " two", " ", " spaces", "\n\n\n", "end", "  "},
      {"I", "'ll", " I", "'LL", " '", "season", " x", "'s"},
      {"a", "\n  "},
      {"123", "45", " ", "678"},
      {"f", "(x", "_", "1", ")!!\r\n\r\n", " ", " y"},
      {"naïve", " Ünïcödé", " привет", " мир"},
      {"日本語", "、テスト", "。x", "²½"},
      {"e", "\u0301t", " नमस", "्त", "े"},
      {"a", "\u00a0b", "\u3000c", "\u2003"},
      {"\t", "\tindent", "\tx"},
      {"don", "'t", "'"},
      {"👩🏽‍💻", " ok"},
      {"...\n\n", "A"},
  };
  for (const Strings& split : expected) {
    std::string text;
    for (const std::string& piece : split) text += piece;
    EXPECT_EQ(pieces(text, PreSplit::cl100k), split);
  }
}

// As cl100k, but for numbers, and white space at the end.
TEST(PreSplit, Qwen) {
  const std::vector<Strings> expected = {
      {"Hello", " world", ",", " it", "'s", " ", "2", "0", "2", "4", "!"},
      {" ", " two", " ", " spaces", "\n\n\n", "end", "  "},
      {"I", "'ll", " I", "'LL", " '", "season", " x", "'s"},
      {"a", "\n", "  "},
      {"a", " \n \r\n", "\t "},
      {"1", "²", "½", " ", "6"},
      {"f", "(x", "_", "1", ")!!\r\n\r\n", " ", " y"},
      {"e", "\u0301t", " नमस", "्त", "े"},
      {"a", "\u00a0b", "\u3000c", "\u2003"},
      {"\t", "\tindent", "\tx"},
      {"...\n\n", "A", "\n\n"},
  };
  for (const Strings& split : expected) {
    std::string text;
    for (const std::string& piece : split) text += piece;
    EXPECT_EQ(pieces(text, PreSplit::qwen), split);
  }
}

TEST(PreSplit, InvalidUtf8CountsAsPunctuation) {
  for (const std::string& bad :
       Strings{"\xFF", "\xC3", "\xE2\x82", "\xC0\xAF", "\xED\xA0\x80", "\xF4\x90\x80\x80"}) {
    EXPECT_EQ(pieces("ab" + bad + " cd", PreSplit::gpt2), (Strings{"ab", bad, " cd"}));
    EXPECT_EQ(pieces("ab" + bad, PreSplit::gpt2), (Strings{"ab", bad}));
  }
}

// --------------------------------------------------------------------------------------------------- BPE

TEST_F(TokenizerTest, MergesTheLowestIdFirstAndTheLeftmostAmongEquals) {
  const Tokenizer tokenizer = load(tokenizer_file(vocabulary({"bc", "ab", "aa", "abcd", " a"})));
  EXPECT_EQ(tokenizer.encode("abc"), (Ids{'a', 256}));  // not ab, c
  EXPECT_EQ(tokenizer.encode("abd"), (Ids{257, 'd'}));
  EXPECT_EQ(tokenizer.encode("aaa"), (Ids{258, 'a'}));
  EXPECT_EQ(tokenizer.encode("xabcdx"), (Ids{'x', 'a', 256, 'd', 'x'}));  // no two neighbours make abcd
  EXPECT_EQ(tokenizer.encode("a a"), (Ids{'a', 260}));
  EXPECT_EQ(tokenizer.decode({259, 260}), "abcd a");
}

TEST_F(TokenizerTest, NeverMergesAcrossPieces) {
  const Strings tokens = vocabulary({"a!", "!a", "1a", "aa", "a\xC3"});
  EXPECT_EQ(load(tokenizer_file(tokens)).encode("a!a1aé"), (Ids{'a', '!', 'a', '1', 260, 0xA9}));
  EXPECT_EQ(load(tokenizer_file(tokens, -1, 2)).encode("a!a1aé"), (Ids{'a', 257, '1', 260, 0xA9}));
  EXPECT_EQ(load(tokenizer_file(vocabulary({"12"}), -1, 2)).encode("12"), (Ids{256}));
  EXPECT_EQ(load(tokenizer_file(vocabulary({"12"}), -1, 3)).encode("12"), (Ids{'1', '2'}));
}

TEST_F(TokenizerTest, AgreesWithTheDefinition) {
  std::mt19937 random(1);
  for (int round = 0; round < 20; round++) {
    Strings merged;
    Strings parts = {"a", "b", "c"};
    while (merged.size() < 30) {  // each a concatenation of two earlier ones, as training makes them
      const std::string token = parts[random() % parts.size()] + parts[random() % parts.size()];
      if (token.size() > 200 || std::count(parts.begin(), parts.end(), token)) continue;
      merged.push_back(token), parts.push_back(token);
    }
    const Strings tokens = vocabulary(merged);
    const Tokenizer tokenizer = load(tokenizer_file(tokens));
    for (int repeat = 0; repeat < 20; repeat++) {
      std::string text;
      for (size_t i = 0; i < 100; i++) text.push_back("abc"[random() % 3]);
      EXPECT_EQ(tokenizer.encode(text), encode_by_definition(tokens, text)) << text;
    }
  }
}

TEST_F(TokenizerTest, LongPiecesTakeNoQuadraticTime) {
  const Tokenizer tokenizer = load(tokenizer_file(vocabulary({"aa", "aaaa", "aaaaaaaa"})));
  const std::string text((1 << 20) + 5, 'a');
  const Ids ids = tokenizer.encode(text);
  EXPECT_EQ(ids.size(), size_t{(1 << 17) + 2});
  EXPECT_EQ(tokenizer.decode(ids), text);
}

TEST_F(TokenizerTest, InvalidUtf8PassesThrough) {
  const Tokenizer tokenizer = load(tokenizer_file(vocabulary({"ab", "\xC3\xA9"})));
  const std::string text = "ab\xFF\xFE é \xC3";
  EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);
  EXPECT_EQ(tokenizer.decode({0xC3, 0xA9, 0xFF}), "\xC3\xA9\xFF");
}

TEST_F(TokenizerTest, TextNeverBecomesTheEndOfTextToken) {
  const Tokenizer tokenizer = load(tokenizer_file(vocabulary({"ab", "!!"}), 257));
  EXPECT_EQ(tokenizer.eot(), 257);
  EXPECT_EQ(tokenizer.encode("ab!!"), (Ids{256, '!', '!'}));
  EXPECT_EQ(tokenizer.decode({257}), "!!");
}

TEST_F(TokenizerTest, AFileThatStatesNoPreSplitMeansGpt2) {
  const Strings tokens = vocabulary({"!a"});
  EXPECT_EQ(load(tokenizer_file(tokens, -1, 0)).encode("!a"), (Ids{'!', 'a'}));
  EXPECT_EQ(load(tokenizer_file(tokens, -1, 2)).encode("!a"), (Ids{256}));
}

TEST_F(TokenizerTest, IdsWithoutTextAreAllowed) {
  const Tokenizer tokenizer = load(tokenizer_file(vocabulary({"ab", "", "", "cd"}), 258));
  EXPECT_EQ(tokenizer.vocab_size(), 260);
  EXPECT_EQ(tokenizer.decode({256, 257, 258, 259}), "abcd");
  EXPECT_EQ(tokenizer.encode("ab"), (Ids{256}));
  EXPECT_EQ(tokenizer.encode("cd"), (Ids{259}));
}

TEST_F(TokenizerTest, ACopyIsWhole) {
  Tokenizer copy = Tokenizer::bytes();
  {
    const Tokenizer original = load(tokenizer_file(vocabulary({"ab"})));
    copy = original;
  }
  EXPECT_EQ(copy.encode("xab"), (Ids{'x', 256}));
}

// --------------------------------------------------------------------------------------------- bad files

TEST_F(TokenizerTest, BadFilesAreRefused) {
  const std::string good = tokenizer_file(vocabulary({"ab"}), 256);
  EXPECT_EQ(load(good).vocab_size(), 257);
  expect_error("", {"truncated header", "have 0 bytes", "expected 1024"});
  expect_error(good.substr(0, 1023), {"truncated header", "have 1023 bytes"});
  expect_error(good.substr(0, 1024), {"truncated", "token 0", "expected 257 tokens"});
  expect_error(good.substr(0, good.size() - 1), {"truncated", "token 256", "prepare_data.py"});
  expect_error(good + '\0', {"over-long", "have 1540 bytes", "expected 1539", "257 tokens"});
  const auto with_field = [&](size_t index, uint32_t value) {
    std::string bytes = good;
    for (size_t i = 0; i < 4; i++) bytes[4 * index + i] = static_cast<char>(value >> (8 * i));
    return bytes;
  };
  expect_error(with_field(0, 20240520), {"magic number 20240520", "expected 20240328"});
  expect_error(with_field(1, 1), {"version 1", "expected 2"});
  expect_error(with_field(2, 0), {"0 tokens", "expected 1 or more"});
  expect_error(with_field(2, 0xFFFFFFFF), {"-1 tokens", "expected 1 or more"});
  expect_error(with_field(2, 0x7FFFFFFF), {"truncated", "token 257", "expected 2147483647 tokens"});
  expect_error(with_field(3, 257), {"end-of-text token 257", "expected -1 to 256"});
  expect_error(with_field(3, static_cast<uint32_t>(-2)), {"end-of-text token -2"});
  expect_error(with_field(4, 4), {"pre-split 4", "expected 0 to 3"});
  fs::remove(path());
  EXPECT_THROW(Tokenizer::load(path()), Error);
}

TEST_F(TokenizerTest, BytesWithoutATokenAreNamed) {
  const Tokenizer tokenizer = load(tokenizer_file({"a", "b"}));
  EXPECT_EQ(tokenizer.encode("ab"), (Ids{0, 1}));
  try {
    tokenizer.encode("az");
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("no token for byte 122"), std::string::npos) << error.what();
  }
}
