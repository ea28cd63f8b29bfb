#!/bin/bash
# The way of somebody new, timed: a first model, then a run with a second island on this machine. Needs atoll in PATH.
set -euo pipefail
folder=$(mktemp -d)
host=
trap '[ -z "$host" ] || kill "$host" 2>/dev/null || true; rm -rf "$folder"' EXIT
cd "$folder"
began=$SECONDS
atoll train quickstart --replicas 2 --max-steps 40 --inner-steps 10 --output-dir runs/first
atoll generate runs/first -p "def main("
echo "first model after $((SECONDS - began)) s"
began=$SECONDS
atoll host quickstart --max-steps 40 --inner-steps 10 --min-replicas 2 --threads 1 --host 127.0.0.1 --output-dir runs/shared &
host=$!
until [ -s runs/shared/coordinator/join.token ]; do
  kill -0 "$host"
  sleep 0.2
done
atoll join @runs/shared/coordinator/join.token --output-dir runs/second --threads 1
wait "$host"
host=
echo "second island after $((SECONDS - began)) s"
