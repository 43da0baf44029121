/* Contender: a program trained by the C client. Started by c_client.py; it answers the requests of benchmarks/contenders.py.
 *
 *   contender PROGRAM THREADS [NAME DTYPE AXES FILE]...     AXES such as 8x3x224x224, FILE the raw bytes of one batch
 */
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "burnish.h"

static burnish_tensor batch[8];
static size_t count;
static burnish_session *session;

static double now(clockid_t clock) {
    struct timespec time;
    clock_gettime(clock, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void stop(void) {
    printf("{\"error\": \"%s\"}\n", burnish_message());
    fflush(stdout);
    exit(1);
}

static long long peak_bytes(void) {
    char line[256];
    long long kilobytes = 0;
    FILE *status = fopen("/proc/self/status", "r");
    while (status != NULL && fgets(line, sizeof line, status) != NULL) sscanf(line, "VmHWM: %lld", &kilobytes);
    if (status != NULL) fclose(status);
    return kilobytes * 1024;
}

static int read_tensor(char **given) {
    burnish_tensor *tensor = &batch[count++];
    size_t bytes = 0;
    tensor->name = given[0];
    tensor->dtype = (burnish_dtype)atoi(given[1]);
    for (char *at = given[2]; tensor->rank < BURNISH_MAX_RANK; at++) {
        tensor->shape[tensor->rank++] = strtoll(at, &at, 10);
        if (*at != 'x') break;
    }
    FILE *file = fopen(given[3], "rb");
    if (file == NULL || fseek(file, 0, SEEK_END) != 0) return 0;
    bytes = (size_t)ftell(file);
    rewind(file);
    tensor->data = malloc(bytes);
    int is_read = tensor->data != NULL && fread(tensor->data, 1, bytes, file) == bytes;
    fclose(file);
    return is_read;
}

static double step(double *loss) {
    burnish_outputs outputs;
    double started = now(CLOCK_MONOTONIC);
    if (burnish_step(session, batch, count, &outputs) != BURNISH_OK) stop();
    *loss = burnish_number(&outputs, "loss");
    return now(CLOCK_MONOTONIC) - started;
}

static void turn(double seconds) {
    double loss, end = now(CLOCK_MONOTONIC) + seconds, busy = now(CLOCK_PROCESS_CPUTIME_ID);
    int steps = 0;
    printf("{\"seconds\": [");
    do printf("%s%.9f", steps++ > 0 ? ", " : "", step(&loss));
    while (now(CLOCK_MONOTONIC) < end);
    printf("], \"processor_seconds\": %.9f}\n", (now(CLOCK_PROCESS_CPUTIME_ID) - busy) / steps);
}

int main(int arguments, char **given) {
    char line[128];
    double loss;
    burnish_options options = {.threads = atoi(given[2])};
    for (int i = 3; i + 3 < arguments; i += 4)
        if (!read_tensor(given + i)) return 1;
    printf("{\"ready\": true}\n");
    fflush(stdout);
    while (fgets(line, sizeof line, stdin) != NULL) {
        if (strncmp(line, "open", 4) == 0) {
            double started = now(CLOCK_MONOTONIC);
            if (burnish_open(given[1], &options, &session) != BURNISH_OK) stop();
            printf("{\"seconds\": %.9f}\n", now(CLOCK_MONOTONIC) - started);
        } else if (strncmp(line, "step", 4) == 0) {
            double seconds = step(&loss);
            printf("{\"seconds\": %.9f, \"loss\": %.17g}\n", seconds, loss);
        } else if (strncmp(line, "turn ", 5) == 0) {
            turn(atof(line + 5));
        } else {
            printf("{\"peak_bytes\": %lld}\n", peak_bytes());
        }
        fflush(stdout);
        if (strncmp(line, "finish", 6) == 0) break;
    }
    burnish_close(session);
    return 0;
}
