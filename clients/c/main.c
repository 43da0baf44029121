/* Trains a program that burnish compiled, on arrays in .npy files, and goes on from its checkpoint when it is started again.
 *
 *   ./train PROGRAM --data x=x.npy --data labels=labels.npy --batch 16 --steps 100 --checkpoint last.safetensors
 */
#define _POSIX_C_SOURCE 200809L
#include "burnish.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_INPUTS 16

typedef struct arguments {
    const char *program, *checkpoint, *exported;
    burnish_options options;
    burnish_tensor arrays[MAX_INPUTS]; /* whole arrays; the first axis counts the samples */
    size_t count;
    int64_t batch, steps, every;
    size_t cache; /* bytes of features */
} arguments;

static int stop(const char *reason, const char *what) {
    fprintf(stderr, "train: %s%s\n", reason, what);
    return 1;
}

static int failed(void) { return stop("", burnish_message()); }

static size_t size_of_dtype(burnish_dtype dtype) {
    switch (dtype) {
        case BURNISH_INT64:
        case BURNISH_UINT64:
        case BURNISH_DOUBLE: return 8;
        case BURNISH_FLOAT:
        case BURNISH_INT32:
        case BURNISH_UINT32: return 4;
        case BURNISH_FLOAT16:
        case BURNISH_INT16:
        case BURNISH_UINT16: return 2;
        default: return 1;
    }
}

/* Bytes of one sample: a step of the first axis. */
static size_t sample_bytes(const burnish_tensor *array) {
    size_t bytes = size_of_dtype(array->dtype);
    for (size_t axis = 1; axis < array->rank; axis++) bytes *= (size_t)array->shape[axis];
    return bytes;
}

/* Read the header of an .npy file (numpy.lib.format): a text such as {'descr': '<f4', 'fortran_order': False, 'shape': (3, 2), }.
 */
static int read_npy_header(FILE *file, burnish_tensor *array) {
    static const struct {
        const char *descr;
        burnish_dtype dtype;
    } TYPES[] = {{"<f4", BURNISH_FLOAT}, {"<f8", BURNISH_DOUBLE}, {"<f2", BURNISH_FLOAT16}, {"<i8", BURNISH_INT64},
                 {"<i4", BURNISH_INT32}, {"|u1", BURNISH_UINT8},  {"|i1", BURNISH_INT8},    {"|b1", BURNISH_BOOL}};
    unsigned char start[10];
    char text[4096];
    if (fread(start, 1, 10, file) != 10 || memcmp(start, "\x93NUMPY\x01", 7) != 0) return 0;
    size_t length = (size_t)start[8] | (size_t)start[9] << 8;
    if (length >= sizeof text || fread(text, 1, length, file) != length) return 0;
    text[length] = 0;
    const char *descr = strstr(text, "'descr': '"), *shape = strstr(text, "'shape': (");
    if (descr == NULL || shape == NULL || strstr(text, "'fortran_order': False") == NULL) return 0;
    for (size_t i = 0; i < sizeof TYPES / sizeof *TYPES; i++)
        if (strncmp(descr + 10, TYPES[i].descr, 3) == 0) array->dtype = TYPES[i].dtype;
    char *at = (char *)shape + 10;
    for (array->rank = 0; *at != ')' && array->rank < BURNISH_MAX_RANK; array->rank++) {
        char *end;
        array->shape[array->rank] = strtoll(at, &end, 10);
        if (end == at || array->shape[array->rank] < 0 || array->shape[array->rank] > INT32_MAX) return 0;
        at = end + strspn(end, ", ");
    }
    return *at == ')' && array->rank > 0 && array->dtype != 0;
}

/* Read what is behind the header: as many bytes as its shape says, and no more. */
static int read_npy_data(FILE *file, burnish_tensor *array) {
    struct stat status;
    long begin = ftell(file);
    size_t bytes = size_of_dtype(array->dtype);
    if (begin < 0 || fstat(fileno(file), &status) != 0 || !S_ISREG(status.st_mode)) return 0;
    size_t left = (size_t)status.st_size - (size_t)begin;
    for (size_t axis = 0; axis < array->rank; axis++) {
        if (array->shape[axis] > 0 && bytes > left / (size_t)array->shape[axis]) return 0;
        bytes *= (size_t)array->shape[axis];
    }
    array->data = malloc(bytes + 1);
    return array->data != NULL && bytes == left && fread(array->data, 1, bytes, file) == bytes;
}

static int read_npy(const char *path, burnish_tensor *array) {
    FILE *file = fopen(path, "rb");
    int is_read = file != NULL && read_npy_header(file, array) && read_npy_data(file, array);
    if (file != NULL) fclose(file);
    return is_read;
}

static int add_array(arguments *arguments, char *text) {
    char *path = strchr(text, '=');
    if (path == NULL) return stop("--data takes name=file.npy, not ", text);
    if (arguments->count == MAX_INPUTS) return stop("there are too many arrays, from this on: ", text);
    *path++ = 0;
    burnish_tensor *array = &arguments->arrays[arguments->count++];
    array->name = text;
    return read_npy(path, array) ? 0 : stop("this is no whole .npy file of numbers in C order: ", path);
}

/* The whole number, from `least` on, that an option is given. */
static int read_number(const char *option, const char *text, int64_t least, int64_t most, int64_t *number) {
    char *end;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (end == text || *end != 0 || errno != 0 || value < least || value > most) {
        fprintf(stderr, "train: %s takes a whole number from %lld to %lld, not '%s'\n", option, (long long)least, (long long)most,
                text);
        return 1;
    }
    *number = value;
    return 0;
}

static int read_option(arguments *to, const char *name, char *value) {
    int64_t number = 0;
    if (strcmp(name, "--data") == 0) return add_array(to, value);
    if (strcmp(name, "--batch") == 0) return read_number(name, value, 1, INT32_MAX, &to->batch);
    if (strcmp(name, "--steps") == 0) return read_number(name, value, 0, INT64_MAX, &to->steps);
    if (strcmp(name, "--every") == 0) return read_number(name, value, 1, INT64_MAX, &to->every);
    if (strcmp(name, "--seed") == 0) return read_number(name, value, INT64_MIN, INT64_MAX, &to->options.seed);
    if (strcmp(name, "--threads") == 0) {
        if (read_number(name, value, 0, 1024, &number) != 0) return 1;
        to->options.threads = (int)number;
    } else if (strcmp(name, "--cache") == 0) {
        if (read_number(name, value, 0, INT32_MAX, &number) != 0) return 1;
        to->cache = (size_t)number << 20;
    } else if (strcmp(name, "--models") == 0) {
        to->options.models = value;
    } else if (strcmp(name, "--checkpoint") == 0) {
        to->checkpoint = value;
    } else if (strcmp(name, "--export") == 0) {
        to->exported = value;
    } else {
        return stop("there is no option ", name);
    }
    return 0;
}

static int read_arguments(arguments *to, int count, char **given) {
    for (int i = 1; i < count; i++) {
        const char *name = given[i];
        if (strncmp(name, "--", 2) == 0) {
            if (++i == count) return stop("a value is missing after ", name);
            if (read_option(to, name, given[i]) != 0) return 1;
        } else if (to->program != NULL) {
            return stop("give one program, and no other: ", name);
        } else {
            to->program = name;
        }
    }
    if (to->program == NULL || to->count == 0)
        return stop("",
                    "usage: train PROGRAM --data NAME=FILE.npy ... [--batch N] [--steps N] [--checkpoint FILE] [--every N] "
                    "[--export FILE] [--models FOLDER] [--threads N] [--seed N] [--cache MEGABYTES]");
    for (size_t i = 0; i < to->count; i++)
        if (to->arrays[i].shape[0] != to->arrays[0].shape[0] || to->arrays[i].shape[0] < to->batch)
            return stop("", "the arrays are to have the same number of samples, and at least a batch");
    return 0;
}

/* The samples of step number `step`: one batch after the other, from the beginning again at the end. */
static void take_batch(const arguments *from, int64_t step, burnish_tensor *batch) {
    int64_t batches = from->arrays[0].shape[0] / from->batch, first = step % batches * from->batch;
    for (size_t i = 0; i < from->count; i++) {
        batch[i] = from->arrays[i];
        batch[i].shape[0] = from->batch;
        batch[i].data = (char *)from->arrays[i].data + (size_t)first * sample_bytes(&from->arrays[i]);
    }
}

/* Where a frozen backbone's features are cached, put them in place of the arrays that they are computed from; returns the number
 * of arrays, or 0 where it failed. */
static size_t take_features(const arguments *from, int64_t step, burnish_session *session, burnish_cache *cache, int64_t *samples,
                            burnish_tensor *batch) {
    int64_t batches = from->arrays[0].shape[0] / from->batch;
    burnish_outputs features;
    size_t count = 0;
    if (cache == NULL) return from->count;
    for (int64_t i = 0; i < from->batch; i++) samples[i] = step % batches * from->batch + i;
    if (burnish_cache_features(cache, samples, (size_t)from->batch, batch, from->count, &features) != BURNISH_OK) return 0;
    for (size_t i = 0; i < from->count; i++)
        if (burnish_takes(session, batch[i].name)) batch[count++] = batch[i];
    for (size_t i = 0; i < features.count && count < 2 * MAX_INPUTS; i++) batch[count++] = features.tensors[i];
    return count;
}

static int train(const arguments *arguments, burnish_session *session, burnish_cache *cache, int64_t *samples) {
    burnish_tensor batch[2 * MAX_INPUTS];
    burnish_outputs outputs;
    /* A checkpoint that is there and cannot be read is not to be replaced by that of a new run. */
    bool is_new = arguments->checkpoint == NULL || (access(arguments->checkpoint, F_OK) != 0 && errno == ENOENT);
    if (!is_new && burnish_restore(session, arguments->checkpoint) != BURNISH_OK) return failed();
    /* What cannot be exported is better told now than after the last step. */
    if (arguments->exported != NULL && burnish_export(session, NULL, 0) != BURNISH_OK) return failed();
    if (burnish_step_count(session) < 0) return stop("the checkpoint counts less than no steps: ", arguments->checkpoint);
    for (int64_t step = burnish_step_count(session); step < arguments->steps; step++) {
        take_batch(arguments, step, batch);
        size_t taken = take_features(arguments, step, session, cache, samples, batch);
        if (taken == 0 || burnish_step(session, batch, taken, &outputs) != BURNISH_OK) return failed();
        printf("step %lld loss %.9g\n", (long long)step + 1, burnish_number(&outputs, "loss"));
        fflush(stdout);
        int is_due = step + 1 == arguments->steps || (step + 1) % arguments->every == 0;
        if (is_due && arguments->checkpoint != NULL && burnish_save(session, arguments->checkpoint, NULL) != BURNISH_OK)
            return failed();
    }
    if (arguments->exported != NULL && burnish_export(session, arguments->exported, 0) != BURNISH_OK) return failed();
    return 0;
}

static int run(const arguments *arguments) {
    burnish_session *session = NULL;
    burnish_cache *cache = NULL;
    int64_t *samples = malloc(sizeof(int64_t) * (size_t)arguments->batch);
    int status = samples == NULL ? stop("there is no memory for a batch", "") : 0;
    if (status == 0 && burnish_open(arguments->program, &arguments->options, &session) != BURNISH_OK) status = failed();
    for (size_t i = 0; status == 0 && i < arguments->count; i++)
        if (burnish_sample_axis(session, arguments->arrays[i].name) != 0)
            status = stop(arguments->arrays[i].name,
                          ": the model has its samples along another axis than the first, or none, and this program takes "
                          "samples of the first: export the model with its samples first, or train it in Python");
    if (status == 0 && burnish_has_features(session) && burnish_cache_open(session, arguments->cache, &cache) != BURNISH_OK)
        status = failed();
    if (status == 0) status = train(arguments, session, cache, samples);
    burnish_cache_close(cache);
    burnish_close(session);
    free(samples);
    return status;
}

int main(int count, char **given) {
    arguments arguments = {.batch = 16, .steps = 100, .every = 10};
    int status = read_arguments(&arguments, count, given);
    if (status == 0) status = run(&arguments);
    for (size_t i = 0; i < arguments.count; i++) free(arguments.arrays[i].data);
    return status;
}
