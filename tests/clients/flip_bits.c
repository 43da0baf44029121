/* Flips bits of a file, one after the other, and makes the client read it each time: every read has to refuse the file.
 *
 *   flip_bits PROGRAM FILE CALL COUNT [MODELS]     COUNT bits that are drawn, 0 for all; the data are x [8, 12] and labels [8]
 */
#define _POSIX_C_SOURCE 200809L
#include "burnish.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define BATCH 8

static const char *program, *path, *called;
static burnish_options options = {.threads = 1};
static burnish_session *session;

static void expect(bool is_right, const char *what) {
    if (is_right) return;
    fprintf(stderr, "%s: %s\n", what, burnish_message());
    exit(1);
}

static burnish_status call(void) {
    static float x[BATCH * 12];
    static int64_t labels[BATCH];
    burnish_tensor batch[] = {{"x", BURNISH_FLOAT, 2, {BATCH, 12}, x}, {"labels", BURNISH_INT64, 1, {BATCH}, labels}};
    burnish_session *opened;
    if (strcmp(called, "restore") == 0) return burnish_restore(session, path);
    if (strcmp(called, "step") == 0) return burnish_step(session, batch, 2, NULL);
    if (strcmp(called, "evaluate") == 0) return burnish_evaluate(session, batch, 2, 0, NULL);
    if (strcmp(called, "predict") == 0) return burnish_predict(session, batch, 1, 0, NULL);
    if (strcmp(called, "features") == 0) return burnish_features(session, batch, 1, NULL);
    if (strcmp(called, "export") == 0) return burnish_export(session, "exported.onnx", 0);
    expect(strcmp(called, "open") == 0, called);
    burnish_status status = burnish_open(program, &options, &opened);
    burnish_close(opened);
    return status;
}

static char *copy_state(size_t *size) {
    char *copy = NULL;
    burnish_tensor entry;
    *size = 0;
    for (size_t i = 0; burnish_state_at(session, i, &entry) == BURNISH_OK; i++) {
        size_t bytes = entry.dtype == BURNISH_FLOAT || entry.dtype == BURNISH_UINT32 ? 4 : 8;
        for (size_t axis = 0; axis < entry.rank; axis++) bytes *= (size_t)entry.shape[axis];
        copy = realloc(copy, *size + bytes);
        expect(copy != NULL, "memory");
        memcpy(copy + *size, entry.data, bytes);
        *size += bytes;
    }
    return copy;
}

/* Flip a bit, or flip it back. */
static void flip(int file, size_t bit) {
    unsigned char byte;
    off_t place = (off_t)(bit / 8);
    bool is_done = pread(file, &byte, 1, place) == 1;
    byte ^= (unsigned char)(1 << bit % 8);
    expect(is_done && pwrite(file, &byte, 1, place) == 1, "the file");
}

int main(int count, char **given) {
    struct stat status;
    if (count != 5 && count != 6) return 2;
    program = given[1], path = given[2], called = given[3], options.models = given[5];
    int file = open(path, O_RDWR);
    expect(file >= 0 && fstat(file, &status) == 0 && status.st_size > 0, path);
    size_t bits = 8 * (size_t)status.st_size, drawn = strtoul(given[4], NULL, 10), size, after;
    expect(burnish_open(program, &options, &session) == BURNISH_OK, program);
    char *before = copy_state(&size);
    for (size_t i = 0; i < (drawn == 0 ? bits : drawn); i++) {
        size_t bit = drawn == 0 ? i : (i * 2654435761u + 12345) % bits;
        flip(file, bit);
        burnish_status refused = call();
        if (refused != BURNISH_CHECKPOINT_ERROR) fprintf(stderr, "bit %zu gives status %d\n", bit, (int)refused);
        expect(refused == BURNISH_CHECKPOINT_ERROR, path);
        flip(file, bit);
    }
    char *kept = copy_state(&after);
    expect(size == after && memcmp(before, kept, size) == 0, "the state has changed");
    expect(call() == BURNISH_OK, "the whole file");
    free(before);
    free(kept);
    burnish_close(session);
    close(file);
    printf("%zu\n", drawn == 0 ? bits : drawn);
    return 0;
}
