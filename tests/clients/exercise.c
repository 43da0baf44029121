/* Calls every function of the client, in several threads at once, each with a session of its own; for runs under sanitizers.
 *
 *   exercise PROGRAM FOLDER THREADS     of a program whose data are x [8, 12] and labels [8]
 */
#define _POSIX_C_SOURCE 200809L
#include "burnish.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BATCH 8
#define MAX_THREADS 16

static const char *program, *folder;
static pthread_barrier_t barrier;

static void expect(int is_right, const char *what) {
    if (is_right) return;
    fprintf(stderr, "%s: %s\n", what, burnish_message());
    exit(1);
}

#define DONE(call) expect((call) == BURNISH_OK, #call)
#define REFUSED(call) expect((call) != BURNISH_OK && *burnish_message() != 0, #call)

/* Fill a cache that is too small, and one that is not; the features are of the latter. */
static burnish_cache *fill_cache(burnish_session *session, burnish_tensor *x, burnish_outputs *features) {
    int64_t samples[BATCH];
    burnish_cache *cache;
    for (int i = 0; i < BATCH; i++) samples[i] = i % 5;
    for (size_t limit = 64;; limit = 0) {
        DONE(burnish_cache_open(session, limit, &cache));
        DONE(burnish_cache_features(cache, samples, BATCH, x, 1, features));
        REFUSED(burnish_cache_features(cache, (int64_t[]){-1}, 1, x, 1, features));
        REFUSED(burnish_cache_features(cache, (int64_t[]){9, 10}, 2, x, 1, features));
        expect(burnish_cache_has(cache, samples, BATCH) == (limit == 0) && burnish_cache_computed(cache) == 5, "the cache");
        DONE(burnish_cache_features(cache, samples, BATCH, x, 1, NULL));
        if (limit == 0) break;
        burnish_cache_close(cache);
    }
    DONE(burnish_features(session, x, 1, features));
    DONE(burnish_cache_features(cache, samples, BATCH, NULL, 0, features));
    return cache;
}

static void train(burnish_session *session, const char *name, burnish_tensor *batch, burnish_tensor *x) {
    burnish_outputs outputs;
    burnish_tensor entry;
    char path[4096];
    for (int step = 0; step < 3; step++) DONE(burnish_step(session, batch, 2, &outputs));
    REFUSED(burnish_step(session, batch, 1, NULL));
    DONE(burnish_evaluate(session, batch, 2, BURNISH_AVERAGE, &outputs));
    DONE(burnish_predict(session, x, 1, 0, &outputs));
    for (size_t i = 0; burnish_state_at(session, i, &entry) == BURNISH_OK; i++) DONE(burnish_write_state(session, &entry));
    REFUSED(burnish_state(session, "none", &entry));
    REFUSED(burnish_set(session, "none", 1));
    snprintf(path, sizeof path, "%s/%s.safetensors", folder, name);
    DONE(burnish_save(session, path, "{\"at\": \"\\u00e9\"}"));
    DONE(burnish_restore(session, path));
    expect(strcmp(burnish_extra(session), "{\"at\": \"\\u00e9\"}") == 0, "extra");
    snprintf(path, sizeof path, "%s/shared.safetensors", folder);
    DONE(burnish_save(session, path, NULL));
    DONE(burnish_restore(session, path));
    REFUSED(burnish_restore(session, folder));
    REFUSED(burnish_restore(session, program));
    REFUSED(burnish_save(session, folder, NULL));
    snprintf(path, sizeof path, "%s/shared.onnx", folder);
    DONE(burnish_export(session, path, BURNISH_AVERAGE));
    expect(burnish_step_count(session) == 3 && burnish_takes(session, batch->name) && burnish_sample_axis(session, "x") == 0, "facts");
}

static void *work(void *given) {
    float x[BATCH * 12];
    int64_t labels[BATCH] = {0, 1, 2, 3, 4, 0, 1, 2};
    burnish_tensor batch[] = {{"x", BURNISH_FLOAT, 2, {BATCH, 12}, x}, {"labels", BURNISH_INT64, 1, {BATCH}, labels}};
    burnish_options options = {.threads = 1};
    burnish_session *session;
    burnish_outputs features;
    for (int i = 0; i < BATCH * 12; i++) x[i] = (float)(i % 7) / 7;
    pthread_barrier_wait(&barrier);
    REFUSED(burnish_open(folder, &options, &session));
    DONE(burnish_open(program, &options, &session));
    if (burnish_has_features(session)) {
        burnish_cache *cache = fill_cache(session, batch, &features);
        train(session, given, (burnish_tensor[]){features.tensors[0], batch[1]}, batch);
        burnish_cache_close(cache);
    } else {
        train(session, given, batch, batch);
    }
    burnish_close(session);
    return NULL;
}

int main(int count, char **given) {
    pthread_t threads[MAX_THREADS];
    char names[MAX_THREADS][16];
    int used = count == 4 ? atoi(given[3]) : 0;
    if (used < 1 || used > MAX_THREADS) return 2;
    program = given[1];
    folder = given[2];
    pthread_barrier_init(&barrier, NULL, (unsigned)used);
    for (int i = 0; i < used; i++) {
        snprintf(names[i], sizeof names[i], "%d", i);
        pthread_create(&threads[i], NULL, work, names[i]);
    }
    for (int i = 0; i < used; i++) pthread_join(threads[i], NULL);
    pthread_barrier_destroy(&barrier);
    return 0;
}
