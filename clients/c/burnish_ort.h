/* The part of ONNX Runtime's C API that burnish.c calls, for where ONNX Runtime's own header is missing, as beside its Python
 * package.
 *
 * ONNX Runtime hands out its functions in one table, to which new versions only append: a program that asks for version 18 of it
 * gets the same places from every later library. The names are those of onnxruntime_c_api.h, so that either header serves
 * burnish.c; the places between the functions used here stay unnamed. For Linux and macOS, where ONNX Runtime has the usual
 * calling convention.
 */
#ifndef BURNISH_ORT_H
#define BURNISH_ORT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define ORT_API_VERSION 18

typedef struct OrtStatus OrtStatus;
typedef struct OrtEnv OrtEnv;
typedef struct OrtMemoryInfo OrtMemoryInfo;
typedef struct OrtSession OrtSession;
typedef struct OrtValue OrtValue;
typedef struct OrtRunOptions OrtRunOptions;
typedef struct OrtSessionOptions OrtSessionOptions;
typedef struct OrtTensorTypeAndShapeInfo OrtTensorTypeAndShapeInfo;
typedef struct OrtArenaCfg OrtArenaCfg;

/* Enumerations, with the values that are used here. */
typedef int OrtLoggingLevel;
typedef int GraphOptimizationLevel;
typedef int OrtAllocatorType;
typedef int OrtMemType;
typedef int ONNXTensorElementDataType;
enum { ORT_LOGGING_LEVEL_FATAL = 4 };
enum { ORT_DISABLE_ALL = 0, ORT_ENABLE_BASIC = 1, ORT_ENABLE_EXTENDED = 2, ORT_ENABLE_ALL = 99 };
enum { OrtArenaAllocator = 1 };
enum { OrtMemTypeDefault = 0 };

typedef struct OrtApi {
    void *places0[2];
    const char *(*GetErrorMessage)(const OrtStatus *status);
    OrtStatus *(*CreateEnv)(OrtLoggingLevel level, const char *log_name, OrtEnv **env);
    void *places4[3];
    OrtStatus *(*CreateSession)(const OrtEnv *env, const char *path, const OrtSessionOptions *options, OrtSession **session);
    OrtStatus *(*CreateSessionFromArray)(const OrtEnv *env, const void *model, size_t bytes, const OrtSessionOptions *options,
                                         OrtSession **session);
    OrtStatus *(*Run)(OrtSession *session, const OrtRunOptions *options, const char *const *input_names,
                      const OrtValue *const *inputs, size_t input_count, const char *const *output_names, size_t output_count,
                      OrtValue **outputs);
    OrtStatus *(*CreateSessionOptions)(OrtSessionOptions **options);
    void *places11[6];
    OrtStatus *(*DisableMemPattern)(OrtSessionOptions *options);
    void *places18[4];
    OrtStatus *(*SetSessionLogSeverityLevel)(OrtSessionOptions *options, int level);
    OrtStatus *(*SetSessionGraphOptimizationLevel)(OrtSessionOptions *options, GraphOptimizationLevel level);
    OrtStatus *(*SetIntraOpNumThreads)(OrtSessionOptions *options, int threads);
    OrtStatus *(*SetInterOpNumThreads)(OrtSessionOptions *options, int threads);
    void *places26[23];
    OrtStatus *(*CreateTensorWithDataAsOrtValue)(const OrtMemoryInfo *memory, void *data, size_t bytes, const int64_t *shape,
                                                 size_t rank, ONNXTensorElementDataType type, OrtValue **value);
    void *places50[1];
    OrtStatus *(*GetTensorMutableData)(OrtValue *value, void **data);
    void *places52[8];
    OrtStatus *(*GetTensorElementType)(const OrtTensorTypeAndShapeInfo *information, ONNXTensorElementDataType *type);
    OrtStatus *(*GetDimensionsCount)(const OrtTensorTypeAndShapeInfo *information, size_t *count);
    OrtStatus *(*GetDimensions)(const OrtTensorTypeAndShapeInfo *information, int64_t *dimensions, size_t count);
    void *places63[2];
    OrtStatus *(*GetTensorTypeAndShape)(const OrtValue *value, OrtTensorTypeAndShapeInfo **information);
    void *places66[3];
    OrtStatus *(*CreateCpuMemoryInfo)(OrtAllocatorType type, OrtMemType memory_type, OrtMemoryInfo **memory);
    void *places70[22];
    void (*ReleaseEnv)(OrtEnv *env);
    void (*ReleaseStatus)(OrtStatus *status);
    void (*ReleaseMemoryInfo)(OrtMemoryInfo *memory);
    void (*ReleaseSession)(OrtSession *session);
    void (*ReleaseValue)(OrtValue *value);
    void *places97[2];
    void (*ReleaseTensorTypeAndShapeInfo)(OrtTensorTypeAndShapeInfo *information);
    void (*ReleaseSessionOptions)(OrtSessionOptions *options);
    void *places101[29];
    OrtStatus *(*AddSessionConfigEntry)(OrtSessionOptions *options, const char *key, const char *value);
    void *places131[13];
    OrtStatus *(*CreateAndRegisterAllocator)(OrtEnv *env, const OrtMemoryInfo *memory, const OrtArenaCfg *configuration);
    void *places145[11];
    OrtStatus *(*CreateArenaCfg)(size_t most_bytes, int extend_strategy, int first_chunk, int most_unused,
                                 OrtArenaCfg **configuration);
    void (*ReleaseArenaCfg)(OrtArenaCfg *configuration);
    void *places158[115];
    OrtStatus *(*SetDeterministicCompute)(OrtSessionOptions *options, bool value);
} OrtApi;

typedef struct OrtApiBase {
    const OrtApi *(*GetApi)(uint32_t version);
    const char *(*GetVersionString)(void);
} OrtApiBase;

const OrtApiBase *OrtGetApiBase(void);

#define BURNISH_AT(function, place) _Static_assert(offsetof(OrtApi, function) == (place) * sizeof(void *), #function)
BURNISH_AT(GetErrorMessage, 2);
BURNISH_AT(CreateSession, 7);
BURNISH_AT(Run, 9);
BURNISH_AT(DisableMemPattern, 17);
BURNISH_AT(SetSessionLogSeverityLevel, 22);
BURNISH_AT(CreateTensorWithDataAsOrtValue, 49);
BURNISH_AT(GetTensorMutableData, 51);
BURNISH_AT(GetTensorElementType, 60);
BURNISH_AT(GetTensorTypeAndShape, 65);
BURNISH_AT(CreateCpuMemoryInfo, 69);
BURNISH_AT(ReleaseEnv, 92);
BURNISH_AT(ReleaseTensorTypeAndShapeInfo, 99);
BURNISH_AT(AddSessionConfigEntry, 130);
BURNISH_AT(CreateAndRegisterAllocator, 144);
BURNISH_AT(CreateArenaCfg, 156);
BURNISH_AT(SetDeterministicCompute, 273);

#endif
