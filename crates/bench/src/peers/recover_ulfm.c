/* One rank of Open MPI with ULFM, for `tenfold bench recover`.
 *
 * usage: recover_ulfm COORDINATOR TEAM BYTES
 *
 * Reduces in a loop until a rank dies, then revokes, shrinks and continues. What the lines mean is in
 * `recover/protocol.rs`. There is no store, and MPI has no timeout: the coordinator stops waiting. */
#define _GNU_SOURCE
#include <mpi.h>
#include <mpi-ext.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { TURNS_BEFORE = 20 };

static FILE *coordinator;
static double *elements;
static int count, rank;

static void say(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vfprintf(coordinator, format, arguments);
    va_end(arguments);
    fputc('\n', coordinator);
    fflush(coordinator);
}

static uint64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Each rank adds a power of two, so the sum says which ranks took part. */
static int all_reduce(MPI_Comm group) {
    for (int index = 0; index < count; index++) elements[index] = (double)(UINT64_C(1) << rank);
    return MPI_Allreduce(MPI_IN_PLACE, elements, count, MPI_DOUBLE, MPI_SUM, group);
}

/* The result, if all elements are the same; otherwise the coordinator hears about it. */
static uint64_t sum(void) {
    for (int index = 1; index < count; index++)
        if (elements[index] != elements[0]) {
            say("wrong rank %d has %.0f at 0 and %.0f at %d", rank, elements[0], elements[index], index);
            pause();
        }
    return (uint64_t)elements[0];
}

static int connect_to(const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof address.sun_path) return 0;
    strcpy(address.sun_path, path);
    int connection = socket(AF_UNIX, SOCK_STREAM, 0);
    if (connection < 0 || connect(connection, (struct sockaddr *)&address, sizeof address) != 0) return 0;
    coordinator = fdopen(connection, "w");
    return coordinator != NULL;
}

static void greet(const char *team) {
    char version[MPI_MAX_LIBRARY_VERSION_STRING];
    int length;
    MPI_Get_library_version(version, &length);
    version[strcspn(version, ",\n\r")] = 0;
    for (char *c = version; *c; c++) if (*c == '\t') *c = ' ';
    say("hello %s %d %d %s", team, rank, (int)getpid(), version);
}

/* Continues until one all-reduce of the survivors has succeeded. */
static MPI_Comm recover(MPI_Comm group) {
    for (;;) {
        MPI_Comm smaller;
        MPIX_Comm_revoke(group);
        if (MPIX_Comm_shrink(group, &smaller) != MPI_SUCCESS) continue;
        MPI_Comm_set_errhandler(smaller, MPI_ERRORS_RETURN);
        group = smaller;
        if (all_reduce(group) == MPI_SUCCESS) return group;
    }
}

int main(int argc, char **arguments) {
    if (argc != 4) return 2;
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* whoever started us may die while we spin */
    MPI_Init(&argc, &arguments);
    MPI_Comm group = MPI_COMM_WORLD;
    int ranks;
    MPI_Comm_set_errhandler(group, MPI_ERRORS_RETURN);
    MPI_Comm_rank(group, &rank);
    MPI_Comm_size(group, &ranks);
    count = atoi(arguments[3]) / (int)sizeof(double);
    elements = malloc((size_t)count * sizeof(double));
    if (!elements || !connect_to(arguments[1])) { perror("cannot reach the coordinator"); return 1; }
    greet(arguments[2]);

    for (int turn = 1; all_reduce(group) == MPI_SUCCESS; turn++) {
        if (sum() != (UINT64_C(1) << ranks) - 1) {
            say("wrong rank %d has %.0f", rank, elements[0]);
            pause();
        }
        if (turn == TURNS_BEFORE) say("running");
    }
    uint64_t error = nanoseconds();
    group = recover(group);
    uint64_t done = nanoseconds();
    say("recovered %llu %llu %llu", (unsigned long long)error, (unsigned long long)done, (unsigned long long)sum());
    while (all_reduce(group) == MPI_SUCCESS) {} /* the others may need this rank's progress until the end */
    pause();
}
