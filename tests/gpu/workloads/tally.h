// Owns a workload's own account: bytes live by kind, calls and failures by operation, one JSON line a phase.
// Refuses to ask the agent or the driver what it should have counted.
#pragma once
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum kind { DEVICE, MANAGED, POOL, VMM, ARRAY, HOST_PINNED, HOST_REGISTERED, KINDS };
static const char *const kind_names[KINDS] = {
    "device", "managed", "pool", "vmm", "array", "host_pinned", "host_registered"};
static long long live[KINDS], peak[KINDS];
/* What only the driver knows: bytes it keeps in its pool. -1: not asked. */
static long long pool_reserved = -1;

struct row { const char *operation; int code; long long count; };
static struct row rows[128];
static int rows_used;

static int called(const char *operation, int code)
{
    int at = 0;
    while (at < rows_used && !(rows[at].code == code && !strcmp(rows[at].operation, operation))) at++;
    if (at == rows_used) rows[rows_used++] = (struct row){operation, code, 0};
    rows[at].count++;
    return code;
}

static void held(enum kind kind, long long bytes)
{
    live[kind] += bytes;
    if (live[kind] > peak[kind]) peak[kind] = live[kind];
}

static void say_table(const char *name, const long long *values)
{
    printf("\"%s\":{", name);
    for (int at = 0; at < KINDS; at++) printf("%s\"%s\":%lld", at ? "," : "", kind_names[at], values[at]);
    printf("},");
}

/* Prints the account, then holds everything until a line comes in. */
static void phase(int number)
{
    char line[16];
    printf("{\"phase\":%d,\"pid\":%d,", number, getpid());
    say_table("live", live);
    say_table("peak", peak);
    printf("\"pool_reserved\":%lld,", pool_reserved);
    printf("\"calls\":[");
    for (int at = 0; at < rows_used; at++)
        printf("%s[\"%s\",%d,%lld]", at ? "," : "", rows[at].operation, rows[at].code, rows[at].count);
    printf("]}\n");
    fflush(stdout);
    if (!fgets(line, sizeof line, stdin)) _exit(0);
}
