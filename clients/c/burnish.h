/* Trains the programs that burnish compiles, on ONNX Runtime's C API and libc alone. docs/c-client.md has a first program.
 *
 * Every function that can fail returns a burnish_status; burnish_message() then says what is wrong and what to do. The names of
 * the statuses are those of burnish's exceptions in Python. A session is used by one thread at a time.
 */
#ifndef BURNISH_H
#define BURNISH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum burnish_status {
    BURNISH_OK = 0,
    BURNISH_INPUT_ERROR,           /* a batch does not fit the program; nothing has run */
    BURNISH_CONFIGURATION_ERROR,   /* an unknown name or option, or a step past the end of the schedule; nothing has run */
    BURNISH_CHECKPOINT_ERROR,      /* a program, checkpoint or file is missing, damaged or of another kind */
    BURNISH_ENGINE_ERROR,          /* ONNX Runtime failed, or there is no memory */
    BURNISH_NON_FINITE_LOSS_ERROR, /* the loss is NaN or infinite; the state is the one from before the step */
    BURNISH_UNSUPPORTED_OPERATOR_ERROR /* the model holds what this client cannot export */
} burnish_status;

/* The numbers that ONNX gives to element types. */
typedef enum burnish_dtype {
    BURNISH_FLOAT = 1,
    BURNISH_UINT8 = 2,
    BURNISH_INT8 = 3,
    BURNISH_UINT16 = 4,
    BURNISH_INT16 = 5,
    BURNISH_INT32 = 6,
    BURNISH_INT64 = 7,
    BURNISH_BOOL = 9,
    BURNISH_FLOAT16 = 10,
    BURNISH_DOUBLE = 11,
    BURNISH_UINT32 = 12,
    BURNISH_UINT64 = 13,
    BURNISH_BFLOAT16 = 16
} burnish_dtype;

#define BURNISH_MAX_RANK 8

/* An array: dense, the last axis first, little-endian. */
typedef struct burnish_tensor {
    const char *name;
    burnish_dtype dtype;
    size_t rank;
    int64_t shape[BURNISH_MAX_RANK];
    void *data;
} burnish_tensor;

/* What a graph returned, valid until the next call with the same session. */
typedef struct burnish_outputs {
    const burnish_tensor *tensors;
    size_t count;
} burnish_outputs;

typedef struct burnish_options {
    int64_t seed;       /* of the random key, where a new state begins */
    int threads;        /* inside one operator; 0 leaves it to ONNX Runtime. Same seed and threads: same results, bitwise */
    int optimization;   /* how far ONNX Runtime rewrites graphs: 0 all (as Python does), 1 extended, 2 basic, 3 none */
    const char *models; /* a folder with <graph>.ort of the same package, to be run in place of <graph>.onnx; NULL for none */
} burnish_options;

typedef struct burnish_session burnish_session;

/* Read evaluate's and predict's parameters, and export's, from the average that the optimizer keeps (ema, swa). */
#define BURNISH_AVERAGE 1
/* Of burnish_export: write the graph as it trains, where Python's export is another: with adapters next to their weights, masks
 * and roundings as nodes. */
#define BURNISH_AS_TRAINED 2

/* Says what the last function that failed in this thread found wrong. */
const char *burnish_message(void);

/* Open the folder of a program, in its first state. options may be NULL. */
burnish_status burnish_open(const char *folder, const burnish_options *options, burnish_session **session);
void burnish_close(burnish_session *session);

/* One training step: outputs are the loss, the metrics and, where the program computes it, the rate. outputs may be NULL. */
burnish_status burnish_step(burnish_session *session, const burnish_tensor *batch, size_t count, burnish_outputs *outputs);
/* Whether a step takes an array of this name. */
bool burnish_takes(const burnish_session *session, const char *name);

/* The axis of an input along which the samples of a batch stand, 0 for most; -1: the input has no samples, and is the same for all. */
int64_t burnish_sample_axis(const burnish_session *session, const char *name);
/* Loss and metrics in inference mode, and their totals ("sum:loss", "count:loss"), which add up over batches. flags: 0 or an
 * average. */
burnish_status burnish_evaluate(burnish_session *session, const burnish_tensor *batch, size_t count, int flags,
                                burnish_outputs *outputs);
/* The model's outputs in inference mode. */
burnish_status burnish_predict(burnish_session *session, const burnish_tensor *batch, size_t count, int flags,
                               burnish_outputs *outputs);
/* Of a program that was compiled with cached features: what the frozen part of the model computes of its inputs, which step and
 * evaluate take in their place. Labels in the batch are not used. */
bool burnish_has_features(const burnish_session *session);
burnish_status burnish_features(burnish_session *session, const burnish_tensor *batch, size_t count, burnish_outputs *outputs);

/* Features by the number of their sample, in memory, so that the frozen part runs once for each. It is closed before its session.
 */
typedef struct burnish_cache burnish_cache;

/* Keep features of up to `limit` bytes, 0 for 256 MiB. Where they are full, those that are there stay, and others are computed
 * each time. */
burnish_status burnish_cache_open(burnish_session *session, size_t limit, burnish_cache **cache);
void burnish_cache_close(burnish_cache *cache);
/* Whether the features of all these samples are kept: their inputs need not be read then. */
bool burnish_cache_has(const burnish_cache *cache, const int64_t *samples, size_t count);
/* The features of `count` samples, given by their numbers, from 0. `batch` has their inputs in the same order; the frozen part
 * runs on those alone that are not kept. outputs are the cache's own, valid until its next call. */
burnish_status burnish_cache_features(burnish_cache *cache, const int64_t *samples, size_t count, const burnish_tensor *batch,
                                      size_t batch_count, burnish_outputs *outputs);
/* How many samples the frozen part has run for. */
int64_t burnish_cache_computed(const burnish_cache *cache);

/* A scalar output as a number; NaN where there is none of this name. */
double burnish_number(const burnish_outputs *outputs, const char *name);

/* Set a hyperparameter, such as "lr", for the steps to come. "monitored", the figure that a plateau goes by, is new for the next
 * step alone. */
burnish_status burnish_set(burnish_session *session, const char *name, double value);
/* How many steps the state has taken. */
int64_t burnish_step_count(const burnish_session *session);

/* State entries by number, from 0 on; BURNISH_CONFIGURATION_ERROR past the last. data is the session's own, valid until the next
 * step. */
burnish_status burnish_state_at(burnish_session *session, size_t number, burnish_tensor *entry);
burnish_status burnish_state(burnish_session *session, const char *name, burnish_tensor *entry);
/* Copy an array of the entry's name, type and shape into the state. */
burnish_status burnish_write_state(burnish_session *session, const burnish_tensor *entry);

/* Write the whole state, in the format that burnish reads in Python: whole or not at all. extra is a JSON object to keep with it,
 * or NULL. */
burnish_status burnish_save(burnish_session *session, const char *path, const char *extra);
/* Take over the state of a checkpoint, from Python or from here. Where it fails the state is as it was. */
burnish_status burnish_restore(burnish_session *session, const char *path);
/* The extra of the checkpoint that was restored last, "{}" before. */
const char *burnish_extra(const burnish_session *session);
/* Write the model with the state's weights as plain ONNX, under the source's own names. flags: 0, BURNISH_AVERAGE,
 * BURNISH_AS_TRAINED, or both. Where path is NULL nothing is written, and the status says whether it could be. */
burnish_status burnish_export(burnish_session *session, const char *path, int flags);

#ifdef __cplusplus
}
#endif

#endif
