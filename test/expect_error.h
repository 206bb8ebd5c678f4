// Errors that a user can cause: one line, exit status 1, and what must be named in it.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "xmod/error.h"

namespace xmod {

inline void expect_error(const std::function<void()>& action, const std::vector<std::string>& parts) {
  try {
    action();
    ADD_FAILURE() << "expected an error with '" << parts[0] << "'";
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_EQ(error.exit_code, 1);
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    for (const std::string& part : parts)
      EXPECT_NE(message.find(part), std::string::npos) << "'" << part << "' in '" << message << "'";
  }
}

}  // namespace xmod
