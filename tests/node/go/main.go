// Allocates on the simulated driver from many goroutines, whose stacks move, through cgo. Ends with the number of
// pairs that it made; any failure, or a pointer that comes back wrong, is a panic.
package main

/*
#cgo LDFLAGS: -ldl
#include <dlfcn.h>
#include <stdlib.h>

typedef int (*init_t)(unsigned);
typedef int (*retain_t)(void **, int);
typedef int (*current_t)(void *);
typedef int (*alloc_t)(unsigned long long *, size_t);
typedef int (*release_t)(unsigned long long);

static init_t init_p; static retain_t retain_p; static current_t current_p; static alloc_t alloc_p; static release_t free_p;
static void *context;

static int load(const char *path) {
	void *library = dlopen(path, RTLD_NOW);
	if (!library) return -1;
	init_p = (init_t)dlsym(library, "cuInit");
	retain_p = (retain_t)dlsym(library, "cuDevicePrimaryCtxRetain");
	current_p = (current_t)dlsym(library, "cuCtxSetCurrent");
	alloc_p = (alloc_t)dlsym(library, "cuMemAlloc_v2");
	free_p = (release_t)dlsym(library, "cuMemFree_v2");
	if (!init_p || !retain_p || !current_p || !alloc_p || !free_p) return -2;
	int code = init_p(0);
	return code ? code : retain_p(&context, 0);
}

static int pair(size_t bytes) {
	unsigned long long pointer = 0;
	int code = current_p(context);
	if (!code) code = alloc_p(&pointer, bytes);
	if (!code && !pointer) return -3;
	return code ? code : free_p(pointer);
}
*/
import "C"

import (
	"fmt"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"
)

// deep makes the stack of its goroutine grow, so that it moves under what is on it.
func deep(levels int, pad [256]byte) byte {
	if levels == 0 {
		return pad[0]
	}
	pad[levels%256]++
	return deep(levels-1, pad) + pad[levels%256]
}

func main() {
	path := C.CString(os.Args[1])
	defer C.free(unsafe.Pointer(path))
	if code := C.load(path); code != 0 {
		panic(fmt.Sprintf("cannot load the driver: %d", code))
	}
	seconds, err := strconv.Atoi(os.Args[2])
	if err != nil {
		panic(err)
	}
	until := time.Now().Add(time.Duration(seconds) * time.Second)
	var pairs int64
	var workers sync.WaitGroup
	for worker := 0; worker < 64; worker++ {
		workers.Add(1)
		go func(worker int) {
			defer workers.Done()
			for round := 0; time.Now().Before(until); round++ {
				deep(round%64, [256]byte{byte(worker)})
				if code := C.pair(C.size_t(4096 * (1 + worker))); code != 0 {
					panic(fmt.Sprintf("goroutine %d: %d", worker, code))
				}
				atomic.AddInt64(&pairs, 1)
			}
		}(worker)
	}
	workers.Wait()
	fmt.Println(atomic.LoadInt64(&pairs))
}
