#!/bin/busybox sh
# shellcheck shell=dash
# The first process of a virtual machine of tests/kernels: mounts what a node has, runs what /plan says, and turns off.
# Lines that begin with @ are results (machine.py reads them); the rest is for whoever reads the console.
/bin/busybox --install -s /bin
export PATH=/bin HOME=/tmp TMPDIR=/tmp RUST_BACKTRACE=0 NO_COLOR=1
# A tick of the agent takes seconds here, its start up to a minute.
export COTENANT_SLOW_HOST=8
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mount -t tmpfs tmpfs /tmp
mount -t tracefs tracefs /sys/kernel/tracing
mount -t securityfs securityfs /sys/kernel/security
mount -t cgroup2 cgroup2 /sys/fs/cgroup
ip link set lo up

now() { cut -d' ' -f1 /proc/uptime; }
# What a file says, line by line, marked.
show() { [ -f "$2" ] && tail -n "${3:-60}" "$2" | cut -c1-600 | sed "s/^/@$1 /"; }

echo "@booted $(now) $(uname -r) $(uname -m) $(nproc)"

# The agent by itself: what this kernel offers, and that the page is served.
agent() {
    COTENANT_SIM_NODE='' /opt/cotenant run > /tmp/agent.log 2>&1 &
    pid=$!
    tries=0
    until wget -q -O /tmp/status http://127.0.0.1:9468/status 2> /dev/null && grep -q '"features":\[{' /tmp/status; do
        tries=$((tries + 1))
        if [ $tries -gt 120 ] || ! kill -0 $pid 2> /dev/null; then
            echo "@agent failed"
            show log /tmp/agent.log
            kill -9 $pid 2> /dev/null
            return
        fi
        sleep 1
    done
    echo "@status $(cat /tmp/status)"
    wget -q -O /tmp/metrics http://127.0.0.1:9468/metrics
    echo "@agent served $(grep -c '^cotenant_' /tmp/metrics) series"
    cp /tmp/agent.log /tmp/features.log
    kill $pid
    wait $pid
    echo "@agent ended $?"
    show log /tmp/features.log 40
}

check() {
    begun=$(now)
    rm -f /tmp/kept.log
    COTENANT_KEEP_LOG=/tmp/kept.log timeout -s KILL "$3" "/opt/deps/$1" --exact "$2" --nocapture > /tmp/out 2>&1
    code=$?
    echo "@check $1 $2 $code $begun $(now)"
    if [ $code = 0 ]; then
        show said /tmp/out 30
    else
        show out /tmp/out 120
        show log /tmp/kept.log
    fi
}

# By everything that root may, or by the capabilities named alone.
doctor() {
    if [ "$1" = root ]; then
        /opt/cotenant doctor --output json > /tmp/out 2> /tmp/err
    else
        # By its path: the shell would take its own.
        /bin/setpriv "--bounding-set=-all,$2" /opt/cotenant doctor --output json > /tmp/out 2> /tmp/err
    fi
    echo "@doctor $1 $? $(tr -d '\n' < /tmp/out)"
    show log /tmp/err 10
}

while read -r word one two three; do
    case $word in
        module)
            if insmod /cotenant_sim_uvm.ko; then
                export COTENANT_SIM_UVM=/dev/cotenant-sim-uvm
                echo "@module loaded"
            else
                echo "@module refused"
                dmesg | tail -n 5 | sed 's/^/@log /'
            fi
            ;;
        set) echo "$two" > "/proc/sys/$one" && echo "@set $one $two" ;;
        hide) mount -t tmpfs none "$one" && echo "@hidden $one" ;;
        bare) umount "$one" && echo "@bare $one" ;;
        agent) agent ;;
        lock) echo "$one" > /sys/kernel/security/lockdown && echo "@locked $one" ;;
        doctor) doctor "$one" "$two" ;;
        check) check "$one" "$two" "$three" ;;
    esac
done < /plan
echo "@done $(now)"
poweroff -f
