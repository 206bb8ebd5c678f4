#!/bin/bash
# Two hosts on one machine: two network namespaces with an address and a name each, joined by a cable, and a run of
# ./train_xmod with a rank on each that speaks MPI over TCP. Checks that
#   - the run is the one of two ranks on one host, byte for byte, with --zero 0 and 1;
#   - the bytes on the cable are those that `plan --ranks 2` foretells;
#   - when the rank on the other host is killed, or the cable cut, nobody waits for it.
# Exit status 77, with a line that says why, where this cannot be done. Run from anywhere; nothing stays behind.
set -eu

skip() {
  echo "skip two hosts: $*"
  exit 77
}

fail() {
  echo "FAIL two hosts: $*"
  exit 1
}

root=$(cd "$(dirname "$0")/.." && pwd)

# Everything happens in namespaces of this script's own, which end with it.
if [ "${1:-}" != --inside ]; then
  command -v mpirun >/dev/null || skip "no mpirun here (scripts/install_deps.sh mpi)"
  mpirun --version 2>/dev/null | grep -q 'Open MPI' || skip "written for Open MPI's mpirun"
  command -v ip >/dev/null || skip "no ip here (apt-get install iproute2)"
  own="--net --mount --uts --ipc --pid --fork --mount-proc --kill-child"
  [ "$(id -u)" = 0 ] || own="--user --map-root-user $own"
  unshare $own true 2>/dev/null || skip "namespaces are not allowed here"
  folder=$(mktemp -d)
  trap 'rm -rf "$folder"' EXIT
  unshare $own "$0" --inside "$folder" && exit 0 || exit $?
fi
folder=$2
cd "$folder"

# ------------------------------------------------------------------------------------------------------
# The hosts

mount -t tmpfs tmpfs /run 2>/dev/null || skip "no file system may be mounted here"  # where ip keeps names
for host in a b; do
  ip netns add $host 2>/dev/null || skip "network namespaces are not allowed here"
  ip -n $host link set lo up
done
ip link add eth0 netns a type veth peer name eth0 netns b 2>/dev/null || skip "no virtual cables here"
ip -n a address add 10.0.0.1/24 dev eth0
ip -n b address add 10.0.0.2/24 dev eth0
for host in a b; do ip -n $host link set eth0 up; done

# A shell on a host, in place of ssh: `agent ADDRESS COMMAND...`.
cat > agent <<'END'
#!/bin/bash
case $1 in 10.0.0.1) host=a ;; 10.0.0.2) host=b ;; *) exit 1 ;; esac
shift
exec ip netns exec $host unshare --uts sh -c "hostname host-$host; $*"
END
chmod +x agent
printf '10.0.0.1 slots=1\n10.0.0.2 slots=1\n' > hostfile

export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMP_WAIT_POLICY=passive
export OMPI_MCA_mpi_yield_when_idle=1 OMPI_MCA_hwloc_base_binding_policy=none OMPI_MCA_orte_tmpdir_base="$folder"

on_one_host() {
  ./agent 10.0.0.1 exec mpirun --oversubscribe -np 2 "$@"
}
on_two_hosts() {
  ./agent 10.0.0.1 exec mpirun --hostfile hostfile -np 2 --mca plm_rsh_agent "$folder/agent" --mca btl tcp,self \
    --mca oob_tcp_keepalive_time 2 --mca oob_tcp_keepalive_intvl 1 --mca oob_tcp_keepalive_probes 3 "$@"
}
sent_bytes() {
  ip netns exec $1 cat /sys/class/net/eth0/statistics/tx_bytes
}

# ------------------------------------------------------------------------------------------------------
# The same run

steps=20
model="--dim 64 --heads 2 --kv-heads 1 --head-dim 32 --ffn-dim 192 --active-layers 4 --dense-prefix 1 --seq-len 64"
train="$root/train_xmod train $model --train-data train.bin --val-data val.bin --batch-size 2 --grad-accum 2
  --eval-interval 10 --checkpoint-interval 10 --threads 1 --seed 3"

# Shards of bytes, in llm.c's layout.
python3 - "$root/README.md" <<'END'
import struct, sys
text = open(sys.argv[1], "rb").read()
for name, ids in ("train", text[:20000]), ("val", text[20000:24000]):
    with open(name + ".bin", "wb") as file:
        file.write(struct.pack("<256i", 20240520, 1, len(ids), *[0] * 253))
        file.write(struct.pack(f"<{len(ids)}H", *ids))
END

# What a run leaves and must not depend on where it ran: all but one column of metrics.csv.
record() {
  (cd $1 && find . -type f ! -name metrics.csv -exec sha256sum {} + | sort -k 2 && cut -d, -f1-8 metrics.csv)
}

for zero in 0 1; do
  on_one_host $train --steps $steps --zero $zero --out one_$zero > one.log 2>&1 || fail "on one host: $(cat one.log)"
  before_a=$(sent_bytes a) before_b=$(sent_bytes b)
  on_two_hosts $train --steps $steps --zero $zero --out two_$zero > two.log 2>&1 || fail "on two hosts: $(cat two.log)"
  carried_a=$(($(sent_bytes a) - before_a)) carried_b=$(($(sent_bytes b) - before_b))
  record one_$zero > one.txt
  record two_$zero > two.txt
  diff one.txt two.txt > difference.txt || fail "--zero $zero: another result than on one host: $(cat difference.txt)"

  # TCP adds headers; two validations, two checkpoints and the start add some traffic from rank to rank.
  "$root/train_xmod" plan $model --ranks 2 --zero $zero --json > plan.json
  python3 - plan.json $steps $carried_a $carried_b <<'END' || fail "--zero $zero: traffic unlike the plan's"
import json, sys
plan = json.load(open(sys.argv[1]))["parallel"]
steps, carried = int(sys.argv[2]), max(int(sys.argv[3]), int(sys.argv[4]))
planned = steps * (plan["gradient_bytes"] + plan["weight_bytes"])
print(f"zero {plan['zero']}: {carried} bytes on the cable, {planned} planned for the gradients and weights of the steps")
sys.exit(not 0.98 * planned <= carried <= 1.15 * planned)
END
done

# ------------------------------------------------------------------------------------------------------
# Faults

# The process id of the rank on host b.
rank_on_b() {
  for pid in $(ip netns pids b); do
    if [ "$(readlink /proc/$pid/exe)" = "$root/train_xmod" ]; then echo $pid; fi
  done
}

# NAME MESSAGE COMMAND...: what mpirun says in the end, and what goes wrong, done to the process id on b.
expect_end_after() {
  local name=$1 message=$2
  shift 2
  on_two_hosts $train --steps 1000000 --zero 1 --eval-interval 0 --out $name > $name.log 2> $name.err &
  local launcher=$!
  for _ in $(seq 300); do
    if [ -d $name/step_00000010 ]; then break; fi
    sleep 0.1
  done
  [ -d $name/step_00000010 ] || fail "$name: no progress: $(cat $name.err)"
  local victim
  victim=$(rank_on_b)
  [ -n "$victim" ] || fail "$name: no rank on host b"
  "$@" $victim
  for _ in $(seq 100); do
    if ! kill -0 $launcher 2>/dev/null && [ -z "$(pgrep -x train_xmod)" ]; then break; fi
    sleep 0.1
  done
  kill -0 $launcher 2>/dev/null && fail "$name: mpirun still there after 10 seconds: $(cat $name.err)"
  [ -z "$(pgrep -x train_xmod)" ] || fail "$name: a rank still there after 10 seconds"
  wait $launcher && fail "$name: exit status 0"
  grep -q "$message" $name.err || fail "$name: no '$message' in the message: $(cat $name.err)"
  # The last checkpoint is whole, and one host can go on with it.
  local last
  last=$(ls -d $name/step_* | sort | tail -1)
  "$root/train_xmod" eval --checkpoint $last --val-data val.bin > eval.log 2>&1 || fail "$name: $(cat eval.log)"
  local more=$(($(echo $last | tail -c 9 | sed 's/^0*//') + 5))
  "$root/train_xmod" ${train#* } --steps $more --resume --out $name > resume.log 2>&1 || fail "$name: $(cat resume.log)"
  echo "$name: all ended, $last is whole, and one host went on with it"
}

cut() {
  ip -n b link set eth0 down
}

expect_end_after killed 'rank 1 with PID' kill -9
expect_end_after cut 'lost communication with a remote daemon' cut
echo "ok two hosts"
