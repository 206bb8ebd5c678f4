#!/bin/sh
# Installs what a part of this project needs, and nothing that is there already:
#
#   scripts/install_deps.sh build       compiler, make, JSON headers
#   scripts/install_deps.sh test        GoogleTest, Open MPI
#   scripts/install_deps.sh mpi         Open MPI, to train with several processes
#   scripts/install_deps.sh plot        Python with numpy, scipy and matplotlib
#   scripts/install_deps.sh reference   PyTorch with a fast BLAS, for the reference model
#   scripts/install_deps.sh lint        clang and clang-format
#
# Several groups may be named at once. Debian and Ubuntu through apt, as root or through sudo; elsewhere it says what
# would be needed. It never asks a question.
set -eu

say() { printf 'install_deps.sh: %s\n' "$*"; }
fail() {
  say "$*" >&2
  exit 1
}

usage() {
  sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
}

apt_packages() {
  case "$1" in
    build) echo "g++ make nlohmann-json3-dev" ;;
    test) echo "libgtest-dev libopenmpi-dev openmpi-bin" ;;
    mpi) echo "libopenmpi-dev openmpi-bin" ;;
    plot) echo "python3 python3-numpy python3-scipy python3-matplotlib" ;;
    reference) echo "python3 python3-numpy python3-torch libopenblas0-pthread" ;;
    lint) echo "clang clang-format libomp-dev" ;;
  esac
}

brew_packages() {
  case "$1" in
    build) echo "libomp make nlohmann-json" ;;
    test) echo "googletest open-mpi" ;;
    mpi) echo "open-mpi" ;;
    plot) echo "python numpy scipy python-matplotlib" ;;
    reference) echo "python numpy pytorch" ;;
    lint) echo "llvm clang-format" ;;
  esac
}

installed() {
  [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]
}

# Those of the packages that are not installed, on one line.
missing() {
  for package in "$@"; do
    installed "$package" || echo "$package"
  done | sort -u | tr '\n' ' ' | sed 's/ $//'
}

as_root() {
  if [ "$(id -u)" = 0 ]; then
    "$@"
  else
    sudo "$@"
  fi
}

# Waits for another apt that is at work instead of failing on its lock.
apt_install() {
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
    -o DPkg::Lock::Timeout=120 "$@"
}

main() {
  apt="" brew=""
  [ $# -gt 0 ] || { usage >&2; exit 2; }
  for group in "$@"; do
    case "$group" in
      build | test | mpi | plot | reference | lint) ;;
      -h | --help) usage; exit 0 ;;
      *) say "no group '$group'; there are build, test, mpi, plot, reference and lint" >&2; exit 2 ;;
    esac
    apt="$apt $(apt_packages "$group")"
    brew="$brew $(brew_packages "$group")"
  done

  if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
    if command -v brew >/dev/null; then
      fail "this is not Debian or Ubuntu; install what is missing with: brew install$brew"
    fi
    fail "this is not Debian or Ubuntu; install what corresponds to:$apt"
  fi

  # shellcheck disable=SC2086  # in the lists of packages every word is one package
  needed=$(missing $apt)
  [ -n "$needed" ] || exit 0
  if [ "$(id -u)" != 0 ] && ! sudo -n true 2>/dev/null; then
    fail "packages are missing and this user may not install them unasked; run: sudo apt-get install -y $needed"
  fi
  say "installing $needed"
  # shellcheck disable=SC2086
  apt_install $needed && exit 0
  say "trying again with fresh package lists"
  as_root apt-get update || true
  # shellcheck disable=SC2086
  apt_install $needed || fail "apt-get could not install $needed; see its messages above"
}

main "$@"
