// What a text must name; and errors that a user can cause: one line, exit status 1, with what must be in it.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "xmod/error.h"

namespace xmod {

inline void expect_parts(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts)
    EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in:\n" << text;
}

inline void expect_error(const std::function<void()>& action, const std::vector<std::string>& parts) {
  try {
    action();
    ADD_FAILURE() << "expected an error with '" << parts[0] << "'";
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_EQ(error.exit_code, 1);
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    expect_parts(message, parts);
  }
}

}  // namespace xmod
