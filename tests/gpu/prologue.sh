# Owns what every proof on a real GPU begins with: the agent, a folder for files, a scratch folder, the mounts. Sourced.
# Refuses card settings. A first argument that is no option is the agent's binary, and is taken off the arguments.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
agent=$here/cotenant
case ${1:--} in
    -*) ;;
    *)
        agent=$1
        shift
        ;;
esac
agent=$(realpath "$agent")
out=${OUT:-$here/results/raw}
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
mkdir -p "$out"

mounted() { grep -q " $1 $2 " /proc/mounts; }
mounted /sys/kernel/tracing tracefs || mount -t tracefs tracefs /sys/kernel/tracing
mounted /sys/fs/bpf bpf || mount -t bpf bpf /sys/fs/bpf
# Where systemd mounts the old hierarchies there, the new one is a folder of them.
mounted /sys/fs/cgroup cgroup2 || mounted /sys/fs/cgroup/unified cgroup2 || mount -t cgroup2 cgroup2 /sys/fs/cgroup

# The driver's library, and the toolkit where nvcc is.
toolkit() {
    library=$(realpath "$(ldconfig -p | awk '/libcuda\.so\.1 .*x86-64/ {print $NF; exit}')")
    nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
    cuda=$(dirname "$(dirname "$(realpath "$nvcc")")")
}

# Workloads in system.slice may have a memory.max.
limits() {
    mkdir -p /sys/fs/cgroup/system.slice
    echo +memory >/sys/fs/cgroup/cgroup.subtree_control
    echo +memory >/sys/fs/cgroup/system.slice/cgroup.subtree_control
}
