/* Runs a graph once on ONNX Runtime for Windows with burnish's kernels: step.exe MODEL INPUTS OUTPUTS KERNELS.
 *
 * INPUTS and OUTPUTS hold arrays as windows.py writes them; the contents of OUTPUTS are replaced by what was computed.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <windows.h>

#include "burnish_ort.h"

enum { MOST = 1024 };

typedef struct {
    char name[256];
    int32_t type, rank;
    int64_t shape[8], bytes;
} Array;

static const OrtApi *api;

static void fail(const char *what, const char *why) {
    fprintf(stderr, "%s: %s\n", what, why);
    exit(1);
}

static void check(OrtStatus *status, const char *what) {
    if (status) fail(what, api->GetErrorMessage(status));
}

static void *symbol(const char *library, const char *name) {
    HMODULE loaded = LoadLibraryA(library);
    void *found = loaded ? (void *)GetProcAddress(loaded, name) : NULL;
    if (!found) fail(library, loaded ? "a function is missing" : "cannot be loaded");
    return found;
}

static char *content(const char *path, size_t *bytes) {
    FILE *file = fopen(path, "rb");
    if (!file) fail(path, "cannot be read");
    fseek(file, 0, SEEK_END);
    *bytes = (size_t)ftell(file);
    rewind(file);
    char *data = malloc(*bytes);
    if (fread(data, 1, *bytes, file) != *bytes) fail(path, "is cut off");
    fclose(file);
    return data;
}

/* The places of the arrays in a file, which follow one another: the description of each, then its elements. */
static int arrays_of(char *data, size_t bytes, Array **arrays, char **elements) {
    int count = 0;
    for (char *end = data + bytes; data < end; ++count) {
        if (count == MOST) fail("inputs or outputs", "are too many");
        arrays[count] = (Array *)data;
        elements[count] = data + sizeof(Array);
        data = elements[count] + (arrays[count]->bytes + 7) / 8 * 8;
    }
    return count;
}

int main(int argc, char **argv) {
    if (argc != 5) fail(argv[0], "give MODEL INPUTS OUTPUTS KERNELS");
    const OrtApiBase *(*get_base)(void) = (const OrtApiBase *(*)(void))symbol("onnxruntime.dll", "OrtGetApiBase");
    OrtStatus *(*register_kernels)(OrtSessionOptions *, const OrtApiBase *) =
        (OrtStatus * (*)(OrtSessionOptions *, const OrtApiBase *)) symbol(argv[4], "RegisterCustomOps");
    api = get_base()->GetApi(ORT_API_VERSION);

    OrtEnv *env;
    OrtSessionOptions *options;
    OrtMemoryInfo *memory;
    OrtSession *session;
    check(api->CreateEnv(ORT_LOGGING_LEVEL_FATAL, "step", &env), "CreateEnv");
    check(api->CreateSessionOptions(&options), "CreateSessionOptions");
    check(api->SetIntraOpNumThreads(options, 2), "SetIntraOpNumThreads");
    check(register_kernels(options, get_base()), "RegisterCustomOps");
    check(api->CreateCpuMemoryInfo(0, OrtMemTypeDefault, &memory), "CreateCpuMemoryInfo");
    size_t bytes;
    char *model = content(argv[1], &bytes);
    check(api->CreateSessionFromArray(env, model, bytes, options, &session), "CreateSessionFromArray");

    static Array *inputs[MOST], *outputs[MOST];
    static char *fed[MOST], *computed[MOST];
    static const char *input_names[MOST], *output_names[MOST];
    static OrtValue *input_values[MOST], *output_values[MOST];
    char *data = content(argv[2], &bytes);
    int input_count = arrays_of(data, bytes, inputs, fed);
    for (int i = 0; i < input_count; ++i) {
        input_names[i] = inputs[i]->name;
        check(api->CreateTensorWithDataAsOrtValue(memory, fed[i], (size_t)inputs[i]->bytes, inputs[i]->shape,
                                                  (size_t)inputs[i]->rank, inputs[i]->type, &input_values[i]),
              inputs[i]->name);
    }
    data = content(argv[3], &bytes);
    int output_count = arrays_of(data, bytes, outputs, computed);
    for (int i = 0; i < output_count; ++i) output_names[i] = outputs[i]->name;
    check(api->Run(session, NULL, input_names, (const OrtValue *const *)input_values, (size_t)input_count, output_names,
                   (size_t)output_count, output_values),
          "Run");
    for (int i = 0; i < output_count; ++i) {
        void *result;
        check(api->GetTensorMutableData(output_values[i], &result), outputs[i]->name);
        memcpy(computed[i], result, (size_t)outputs[i]->bytes);
    }
    FILE *file = fopen(argv[3], "wb");
    if (!file || fwrite(data, 1, bytes, file) != bytes || fclose(file)) fail(argv[3], "cannot be written");
    return 0;
}
