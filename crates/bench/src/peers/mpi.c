/* One rank of an MPI, measured by `tenfold bench`.
 *
 * usage: mpi COORDINATOR TEAM
 *
 * Says hello to the coordinator, a Unix socket, then sleeps in read() until told what to run; between two cases it
 * costs nobody a cycle. Only the MPI standard is used, so that one source serves every MPI. What the lines mean is in
 * `collectives/protocol.rs`; the values by which results are checked are those of `collectives/values.rs`. */
#define _GNU_SOURCE
#include <mpi.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif

enum { LINE_MAX_BYTES = 512, BATCHES_MAX = 1000, ALIGNMENT = 4096, TAG = 7 };

static int rank, ranks;
static FILE *coordinator_in, *coordinator_out;

typedef struct {
    const char *name;
    size_t size;
    MPI_Datatype type; /* MPI_DATATYPE_NULL: this MPI has none that it can add */
    MPI_Datatype carrier; /* moves the same bytes without looking at them */
} Dtype;

typedef struct {
    char op[32], dtype[16];
    size_t bytes;
    int check, warmup, batches, iterations;
} Case;

typedef struct {
    Case shape;
    Dtype dtype;
    int count, block; /* elements in all, and of one rank */
    char *in, *out;
} Work;

static void answer(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vfprintf(coordinator_out, format, arguments);
    va_end(arguments);
    fputc('\n', coordinator_out);
    fflush(coordinator_out);
}

static int same(const char *a, const char *b) { return strcmp(a, b) == 0; }

static Dtype dtype_named(const char *name) {
    Dtype half = {"f16", 2, MPI_DATATYPE_NULL, MPI_UINT16_T}, brain = {"bf16", 2, MPI_DATATYPE_NULL, MPI_UINT16_T};
#ifdef MPIX_C_BF16 /* Only with both: MPICH 4.0 has a float16 alone, and aborts when asked to add it. */
    half.type = MPIX_C_FLOAT16;
    brain.type = MPIX_C_BF16;
#endif
    const Dtype all[] = {
        {"f32", 4, MPI_FLOAT, MPI_FLOAT},       {"f64", 8, MPI_DOUBLE, MPI_DOUBLE},
        {"i32", 4, MPI_INT32_T, MPI_INT32_T},   {"i64", 8, MPI_INT64_T, MPI_INT64_T},
        {"u8", 1, MPI_UINT8_T, MPI_UINT8_T},    half, brain,
    };
    for (size_t index = 0; index < sizeof all / sizeof *all; index++)
        if (same(all[index].name, name)) return all[index];
    return (Dtype){NULL, 1, MPI_DATATYPE_NULL, MPI_DATATYPE_NULL};
}

static int is_reduction(const char *op) {
    return same(op, "all_reduce") || same(op, "reduce") || same(op, "reduce_scatter");
}

static int is_in_place(const char *op) { return same(op, "all_reduce") || same(op, "reduce") || same(op, "broadcast"); }

/* A small whole number: exact in every dtype, and so are its sums over 64 ranks. */
static unsigned value(int of_rank, size_t index, int reduction) {
    uint32_t mixed = (uint32_t)index * 2654435761u + (uint32_t)of_rank * 2246822519u;
    return (mixed >> 16) % (reduction ? 3 : 127);
}

static unsigned value_sum(size_t index) {
    unsigned sum = 0;
    for (int of_rank = 0; of_rank < ranks; of_rank++) sum += value(of_rank, index, 1);
    return sum;
}

static void put(char *target, const Dtype *dtype, unsigned number) {
    if (same(dtype->name, "f32")) { float x = number; memcpy(target, &x, 4); }
    else if (same(dtype->name, "f64")) { double x = number; memcpy(target, &x, 8); }
    else if (same(dtype->name, "i32")) { int32_t x = (int32_t)number; memcpy(target, &x, 4); }
    else if (same(dtype->name, "i64")) { int64_t x = number; memcpy(target, &x, 8); }
    else if (same(dtype->name, "u8")) { *target = (char)number; }
    else {
        float x = number;
        uint32_t bits;
        memcpy(&bits, &x, 4);
        uint16_t narrow = (uint16_t)(bits >> 16); /* bf16: the upper half */
        if (same(dtype->name, "f16")) narrow = number == 0 ? 0 : (uint16_t)((bits >> 13) - ((127 - 15) << 10));
        memcpy(target, &narrow, 2);
    }
}

/* What this rank should hold at `index` of its result. */
static unsigned expected(const Work *work, size_t index) {
    const char *op = work->shape.op;
    size_t block = (size_t)work->block, source = index / block, place = index % block;
    if (same(op, "all_reduce") || same(op, "reduce")) return value_sum(index);
    if (same(op, "reduce_scatter")) return value_sum((size_t)rank * block + index);
    if (same(op, "all_gather") || same(op, "gather")) return value((int)source, place, 0);
    if (same(op, "all_to_all")) return value((int)source, (size_t)rank * block + place, 0);
    if (same(op, "scatter")) return value(0, (size_t)rank * block + index, 0);
    return value(0, index, 0); /* broadcast, send_recv: the root's */
}

/* How many elements of the result this rank has a say about. */
static size_t result_count(const Work *work) {
    const char *op = work->shape.op;
    if (same(op, "barrier")) return 0;
    if ((same(op, "reduce") || same(op, "gather")) && rank != 0) return 0;
    if (same(op, "send_recv") && rank > 1) return 0;
    if (same(op, "reduce_scatter") || same(op, "scatter")) return (size_t)work->block;
    return (size_t)work->count;
}

static int bounce(Work *work, MPI_Datatype type) {
    if (rank > 1) return MPI_SUCCESS;
    int error;
    if (rank == 0) {
        error = MPI_Send(work->in, work->count, type, 1, TAG, MPI_COMM_WORLD);
        if (error != MPI_SUCCESS) return error;
        return MPI_Recv(work->out, work->count, type, 1, TAG, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    }
    error = MPI_Recv(work->out, work->count, type, 0, TAG, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    if (error != MPI_SUCCESS) return error;
    return MPI_Send(work->out, work->count, type, 0, TAG, MPI_COMM_WORLD);
}

typedef int (*Operation)(Work *);

static int all_reduce(Work *w) {
    return MPI_Allreduce(MPI_IN_PLACE, w->in, w->count, w->dtype.type, MPI_SUM, MPI_COMM_WORLD);
}
static int reduce(Work *w) {
    if (rank == 0) return MPI_Reduce(MPI_IN_PLACE, w->in, w->count, w->dtype.type, MPI_SUM, 0, MPI_COMM_WORLD);
    return MPI_Reduce(w->in, NULL, w->count, w->dtype.type, MPI_SUM, 0, MPI_COMM_WORLD);
}
static int reduce_scatter(Work *w) {
    return MPI_Reduce_scatter_block(w->in, w->out, w->block, w->dtype.type, MPI_SUM, MPI_COMM_WORLD);
}
static int broadcast(Work *w) { return MPI_Bcast(w->in, w->count, w->dtype.carrier, 0, MPI_COMM_WORLD); }
static int all_gather(Work *w) {
    MPI_Datatype type = w->dtype.carrier;
    return MPI_Allgather(w->in, w->block, type, w->out, w->block, type, MPI_COMM_WORLD);
}
static int all_to_all(Work *w) {
    MPI_Datatype type = w->dtype.carrier;
    return MPI_Alltoall(w->in, w->block, type, w->out, w->block, type, MPI_COMM_WORLD);
}
static int gather(Work *w) {
    MPI_Datatype type = w->dtype.carrier;
    return MPI_Gather(w->in, w->block, type, w->out, w->block, type, 0, MPI_COMM_WORLD);
}
static int scatter(Work *w) {
    MPI_Datatype type = w->dtype.carrier;
    return MPI_Scatter(w->in, w->block, type, w->out, w->block, type, 0, MPI_COMM_WORLD);
}
static int send_recv(Work *w) { return bounce(w, w->dtype.carrier); }
static int barrier(Work *w) {
    (void)w;
    return MPI_Barrier(MPI_COMM_WORLD);
}

static Operation operation_named(const char *name) {
    static const struct { const char *name; Operation run; } all[] = {
        {"all_reduce", all_reduce}, {"broadcast", broadcast}, {"reduce", reduce}, {"reduce_scatter", reduce_scatter},
        {"all_gather", all_gather}, {"all_to_all", all_to_all}, {"gather", gather}, {"scatter", scatter},
        {"send_recv", send_recv}, {"barrier", barrier},
    };
    for (size_t index = 0; index < sizeof all / sizeof *all; index++)
        if (same(all[index].name, name)) return all[index].run;
    return NULL;
}

static uint64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Buffers live as long as the case: the rounds of one case find them touched. */
static int allocate(Work *work, const Case *shape) {
    if (work->in && same(work->shape.op, shape->op) && same(work->shape.dtype, shape->dtype) &&
        work->shape.bytes == shape->bytes) {
        work->shape = *shape;
        return 1;
    }
    free(work->in);
    free(work->out);
    work->in = work->out = NULL;
    work->shape = *shape;
    work->dtype = dtype_named(shape->dtype);
    work->count = (int)(shape->bytes / work->dtype.size);
    work->block = work->count / ranks > 0 ? work->count / ranks : 1;
    size_t bytes = (shape->bytes / ALIGNMENT + 1) * ALIGNMENT;
    work->in = aligned_alloc(ALIGNMENT, bytes);
    work->out = aligned_alloc(ALIGNMENT, is_in_place(shape->op) ? ALIGNMENT : bytes);
    return work->in && work->out;
}

/* Runs it once with known values; 0 after having told the coordinator what is wrong. */
static int verify(Work *work, Operation run) {
    const char *op = work->shape.op;
    const Dtype *dtype = &work->dtype;
    char *result = is_in_place(op) ? work->in : work->out;
    for (size_t index = 0; index < (size_t)work->count; index++)
        put(work->in + index * dtype->size, dtype, value(rank, index, is_reduction(op)));
    if (!is_in_place(op)) memset(work->out, 0xff, work->shape.bytes);

    int error = run(work);
    if (error != MPI_SUCCESS) {
        char text[MPI_MAX_ERROR_STRING];
        int length;
        MPI_Error_string(error, text, &length);
        for (char *c = text; *c; c++) if (*c == '\n') *c = ' ';
        answer("cannot %s", text);
        return 0;
    }
    for (size_t index = 0; index < result_count(work); index++) {
        char right[8];
        put(right, dtype, expected(work, index));
        if (memcmp(right, result + index * dtype->size, dtype->size) != 0) {
            answer("wrong rank %d has another value at %zu than expected", rank, index);
            return 0;
        }
    }
    /* Zeros stay zeros however often they are added. */
    memset(work->in, 0, work->shape.bytes);
    if (!is_in_place(op)) memset(work->out, 0, work->shape.bytes);
    return 1;
}

static void measure(Work *work, Operation run) {
    uint64_t times[BATCHES_MAX];
    MPI_Barrier(MPI_COMM_WORLD);
    for (int turn = 0; turn < work->shape.warmup; turn++) run(work);
    for (int batch = 0; batch < work->shape.batches; batch++) {
        uint64_t start = nanoseconds();
        for (int turn = 0; turn < work->shape.iterations; turn++) run(work);
        times[batch] = nanoseconds() - start;
    }
    fprintf(coordinator_out, "done - ");
    for (int batch = 0; batch < work->shape.batches; batch++)
        fprintf(coordinator_out, batch ? ",%llu" : "%llu", (unsigned long long)times[batch]);
    answer("");
}

static void serve(Work *work, const char *line) {
    Case shape;
    if (sscanf(line, "run %31s %15s %zu %*s %d %d %d %d", shape.op, shape.dtype, &shape.bytes, &shape.check,
               &shape.warmup, &shape.batches, &shape.iterations) != 7 || shape.batches > BATCHES_MAX) {
        answer("wrong rank %d does not understand what to run", rank);
        return;
    }
    Operation run = operation_named(shape.op);
    Dtype dtype = dtype_named(shape.dtype);
    if (!run || !dtype.name) { answer("cannot it knows no %s of %s", shape.op, shape.dtype); return; }
    if (is_reduction(shape.op) && dtype.type == MPI_DATATYPE_NULL) { answer("cannot it has no %s", dtype.name); return; }
    if (!allocate(work, &shape)) { answer("wrong rank %d has no memory for %zu bytes", rank, shape.bytes); return; }
    if (shape.check && !verify(work, run)) return;
    measure(work, run);
}

static int connect_to(const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof address.sun_path) return 0;
    strcpy(address.sun_path, path);
    int connection = socket(AF_UNIX, SOCK_STREAM, 0);
    if (connection < 0 || connect(connection, (struct sockaddr *)&address, sizeof address) != 0) return 0;
    coordinator_in = fdopen(connection, "r");
    coordinator_out = fdopen(dup(connection), "w");
    return coordinator_in && coordinator_out;
}

int main(int count, char **arguments) {
    if (count != 3) return 2;
#ifdef __linux__
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* whoever started us may die while we spin */
#endif
    MPI_Init(&count, &arguments);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (!connect_to(arguments[1])) { perror("cannot reach the coordinator"); return 1; }

    char version[MPI_MAX_LIBRARY_VERSION_STRING];
    int length;
    MPI_Get_library_version(version, &length);
    version[strcspn(version, ",\n\r")] = 0;
    for (char *c = version; *c; c++) if (*c == '\t') *c = ' ';
    answer("hello %s %d %s", arguments[2], rank, version);

    Work work = {0};
    char line[LINE_MAX_BYTES];
    /* An end without `bye` is a coordinator that died: no good manners then, the others may be gone as well. */
    while (fgets(line, sizeof line, coordinator_in)) {
        if (strncmp(line, "bye", 3) == 0) { MPI_Finalize(); return 0; }
        serve(&work, line);
    }
    _exit(1);
}
