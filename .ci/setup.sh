#!/usr/bin/env bash
# What the Makefile needs before it can run something.
#   .ci/setup.sh venv EXTRAS   .venv with this project (editable) and the extras, versions from constraints.txt
#   .ci/setup.sh services      Java, Maven and redis-server for the `local` stack
# As root on a Debian-like system it installs missing packages; anybody else is told in one line what to install.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
  echo "error: $*" >&2
  exit 2
}

can_apt() {
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null
}

# Newer releases have no Java 17 any more; their default is later than that.
available() {
  local name
  for name in "$@"; do
    if [ "$name" = openjdk-17-jre-headless ] && ! apt-cache show "$name" >/dev/null 2>&1; then
      name=default-jre-headless
    fi
    echo "$name"
  done
}

# Debian starts a service as soon as its package is there. The stacks start servers of their own at free ports, so none
# may be left on the usual ones: a policy-rc.d that says no for the time of the installation, and no start at boot.
apt_install() {
  local policy=/usr/sbin/policy-rc.d made=""
  echo "installing $*" >&2
  if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
    made=yes
  fi
  local status=0 log
  log=$(mktemp)
  { apt-get update -qq && available "$@" | DEBIAN_FRONTEND=noninteractive xargs apt-get install -y -qq --no-install-recommends; } \
    >"$log" 2>&1 || status=$?
  [ -z "$made" ] || rm -f "$policy"
  if [ "$status" != 0 ]; then
    tail -n 5 "$log" >&2
    fail "apt-get install $* failed"
  fi
  rm -f "$log"
}

# The first Python that runs and is new enough; a name on the PATH may be a shim for a version that is not there.
find_python() {
  local name
  for name in python3.13 python3.12 python3.11 python3; do
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
      echo "$name"
      return
    fi
  done
  fail "needs Python 3.11 or later: apt-get install python3 python3-venv"
}

make_venv() {
  local python
  [ ! -x .venv/bin/pip ] || return 0
  python=$(find_python)
  if ! "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
    can_apt || fail "$python has no venv module: apt-get install python3-venv"
    apt_install python3-venv
  fi
  rm -rf .venv
  "$python" -m venv .venv
}

install_venv() {
  local extras=$1
  echo "setting up .venv with [$extras]" >&2
  make_venv
  .venv/bin/pip install -q -e ".[$extras]" -c constraints.txt || fail "pip could not install the packages (above)"
  # One stamp per set of extras; the larger set includes the smaller.
  touch .venv/.embedded
  case ",$extras," in *,dev,*) touch .venv/.dev ;; esac
  case ",$extras," in *,train,*) touch .venv/.train ;; esac
}

java_is_new_enough() {
  local java=${JAVA_HOME:+$JAVA_HOME/bin/}java
  "$java" -version 2>&1 | grep -Eq 'version "(1[7-9]|[2-9][0-9])'
}

install_services() {
  local missing=()
  java_is_new_enough || missing+=(openjdk-17-jre-headless)
  command -v mvn >/dev/null || missing+=(maven)
  command -v redis-server >/dev/null || missing+=(redis-server)
  [ ${#missing[@]} -gt 0 ] || return 0
  can_apt || fail "the local stack needs: apt-get install ${missing[*]}  (make test STACK=embedded runs without)"
  apt_install "${missing[@]}"
  case " ${missing[*]} " in
    *" redis-server "*) systemctl disable redis-server >/dev/null 2>&1 || true ;;
  esac
}

case "${1:-}" in
  venv) install_venv "${2:?extras}" ;;
  services) install_services ;;
  *) fail "usage: .ci/setup.sh venv EXTRAS | services" ;;
esac
