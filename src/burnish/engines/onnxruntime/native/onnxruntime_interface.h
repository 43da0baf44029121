// The functions of ONNX Runtime's C API that kernels call, declared here: the Python package brings no header. ONNX Runtime hands them out
// in a table, to which new versions only append, so that a library that asks for version 18 of it runs with every later ONNX Runtime.
// The names are those of onnxruntime_c_api.h; places between the functions used here stay unnamed.

#pragma once

#include <cstddef>
#include <cstdint>

constexpr uint32_t kInterfaceVersion = 18;

extern "C" {

struct OrtStatus;
struct OrtValue;
struct OrtSessionOptions;
struct OrtCustomOpDomain;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtShapeInferContext;
struct OrtTensorTypeAndShapeInfo;
struct OrtOpAttr;
struct OrtCustomOp;

// Enumerations, with the values that are used here.
enum OrtErrorCode : int { ORT_FAIL = 1, ORT_RUNTIME_EXCEPTION = 6 };
enum OrtOpAttrType : int { ORT_OP_ATTR_INT = 1, ORT_OP_ATTR_INTS = 2 };
enum OrtMemType : int { OrtMemTypeDefault = 0 };
enum OrtCustomOpInputOutputCharacteristic : int { INPUT_OUTPUT_REQUIRED = 0, INPUT_OUTPUT_OPTIONAL = 1, INPUT_OUTPUT_VARIADIC = 2 };
enum ONNXTensorElementDataType : int {
  ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED = 0,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT = 1,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64 = 7,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL = 9,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE = 11,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16 = 16
};

struct OrtApi {
  OrtStatus* (*CreateStatus)(OrtErrorCode code, const char* message);
  void* places1[1];
  const char* (*GetErrorMessage)(const OrtStatus* status);
  void* places3[23];
  OrtStatus* (*CreateCustomOpDomain)(const char* domain, OrtCustomOpDomain** made);
  OrtStatus* (*CustomOpDomain_Add)(OrtCustomOpDomain* domain, const OrtCustomOp* op);
  OrtStatus* (*AddCustomOpDomain)(OrtSessionOptions* options, OrtCustomOpDomain* domain);
  void* places29[22];
  OrtStatus* (*GetTensorMutableData)(OrtValue* value, void** data);
  void* places52[5];
  OrtStatus* (*CreateTensorTypeAndShapeInfo)(OrtTensorTypeAndShapeInfo** made);
  OrtStatus* (*SetTensorElementType)(OrtTensorTypeAndShapeInfo* information, ONNXTensorElementDataType type);
  OrtStatus* (*SetDimensions)(OrtTensorTypeAndShapeInfo* information, const int64_t* dimensions, size_t count);
  OrtStatus* (*GetTensorElementType)(const OrtTensorTypeAndShapeInfo* information, ONNXTensorElementDataType* type);
  OrtStatus* (*GetDimensionsCount)(const OrtTensorTypeAndShapeInfo* information, size_t* count);
  OrtStatus* (*GetDimensions)(const OrtTensorTypeAndShapeInfo* information, int64_t* dimensions, size_t count);
  OrtStatus* (*GetSymbolicDimensions)(const OrtTensorTypeAndShapeInfo* information, const char** names, size_t count);
  void* places64[1];
  OrtStatus* (*GetTensorTypeAndShape)(const OrtValue* value, OrtTensorTypeAndShapeInfo** information);
  void* places66[19];
  OrtStatus* (*KernelInfoGetAttribute_float)(const OrtKernelInfo* information, const char* name, float* value);
  OrtStatus* (*KernelInfoGetAttribute_int64)(const OrtKernelInfo* information, const char* name, int64_t* value);
  void* places87[1];
  OrtStatus* (*KernelContext_GetInputCount)(const OrtKernelContext* context, size_t* count);
  OrtStatus* (*KernelContext_GetOutputCount)(const OrtKernelContext* context, size_t* count);
  OrtStatus* (*KernelContext_GetInput)(const OrtKernelContext* context, size_t index, const OrtValue** value);
  OrtStatus* (*KernelContext_GetOutput)(OrtKernelContext* context, size_t index, const int64_t* sizes, size_t rank, OrtValue** value);
  void* places92[1];
  void (*ReleaseStatus)(OrtStatus* status);
  void* places94[5];
  void (*ReleaseTensorTypeAndShapeInfo)(OrtTensorTypeAndShapeInfo* information);
  void* places100[1];
  void (*ReleaseCustomOpDomain)(OrtCustomOpDomain* domain);
  void* places102[60];
  OrtStatus* (*KernelInfoGetAttributeArray_float)(const OrtKernelInfo* information, const char* name, float* values, size_t* count);
  OrtStatus* (*KernelInfoGetAttributeArray_int64)(const OrtKernelInfo* information, const char* name, int64_t* values, size_t* count);
  void* places164[103];
  OrtStatus* (*ShapeInferContext_GetInputCount)(const OrtShapeInferContext* context, size_t* count);
  OrtStatus* (*ShapeInferContext_GetInputTypeShape)(const OrtShapeInferContext* context, size_t index, OrtTensorTypeAndShapeInfo** information);
  OrtStatus* (*ShapeInferContext_GetAttribute)(const OrtShapeInferContext* context, const char* name, const OrtOpAttr** attribute);
  OrtStatus* (*ShapeInferContext_SetOutputTypeShape)(const OrtShapeInferContext* context, size_t index,
                                                     const OrtTensorTypeAndShapeInfo* information);
  OrtStatus* (*SetSymbolicDimensions)(OrtTensorTypeAndShapeInfo* information, const char** names, size_t count);
  OrtStatus* (*ReadOpAttr)(const OrtOpAttr* attribute, OrtOpAttrType type, void* data, size_t bytes, size_t* needed);
  void* places273[1];
  OrtStatus* (*KernelContext_ParallelFor)(const OrtKernelContext* context, void (*run)(void*, size_t), size_t total, size_t batches,
                                          void* data);
};

struct OrtApiBase {
  const OrtApi* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)();
};

// An operator as ONNX Runtime knows it: what it calls to make a kernel of a node, to run it, and to learn of its inputs and outputs.
struct OrtCustomOp {
  uint32_t version;
  void* (*CreateKernel)(const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* information);
  const char* (*GetName)(const OrtCustomOp* op);
  const char* (*GetExecutionProviderType)(const OrtCustomOp* op);
  ONNXTensorElementDataType (*GetInputType)(const OrtCustomOp* op, size_t index);
  size_t (*GetInputTypeCount)(const OrtCustomOp* op);
  ONNXTensorElementDataType (*GetOutputType)(const OrtCustomOp* op, size_t index);
  size_t (*GetOutputTypeCount)(const OrtCustomOp* op);
  void (*KernelCompute)(void* kernel, OrtKernelContext* context);
  void (*KernelDestroy)(void* kernel);
  OrtCustomOpInputOutputCharacteristic (*GetInputCharacteristic)(const OrtCustomOp* op, size_t index);
  OrtCustomOpInputOutputCharacteristic (*GetOutputCharacteristic)(const OrtCustomOp* op, size_t index);
  OrtMemType (*GetInputMemoryType)(const OrtCustomOp* op, size_t index);
  int (*GetVariadicInputMinArity)(const OrtCustomOp* op);
  int (*GetVariadicInputHomogeneity)(const OrtCustomOp* op);
  int (*GetVariadicOutputMinArity)(const OrtCustomOp* op);
  int (*GetVariadicOutputHomogeneity)(const OrtCustomOp* op);
  OrtStatus* (*CreateKernelV2)(const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* information, void** kernel);
  OrtStatus* (*KernelComputeV2)(void* kernel, OrtKernelContext* context);
  OrtStatus* (*InferOutputShapeFn)(const OrtCustomOp* op, OrtShapeInferContext* context);
  int (*GetStartVersion)(const OrtCustomOp* op);
  int (*GetEndVersion)(const OrtCustomOp* op);
  size_t (*GetMayInplace)(int** inputs, int** outputs);
  void (*ReleaseMayInplace)(int* inputs, int* outputs);
  size_t (*GetAliasMap)(int** inputs, int** outputs);
  void (*ReleaseAliasMap)(int* inputs, int* outputs);
};
}

#define BURNISH_AT(function, place) static_assert(offsetof(OrtApi, function) == (place) * sizeof(void*))
BURNISH_AT(AddCustomOpDomain, 28);
BURNISH_AT(GetTensorMutableData, 51);
BURNISH_AT(GetDimensions, 62);
BURNISH_AT(GetTensorTypeAndShape, 65);
BURNISH_AT(KernelInfoGetAttribute_int64, 86);
BURNISH_AT(KernelContext_GetOutput, 91);
BURNISH_AT(ReleaseStatus, 93);
BURNISH_AT(ReleaseTensorTypeAndShapeInfo, 99);
BURNISH_AT(ReleaseCustomOpDomain, 101);
BURNISH_AT(KernelInfoGetAttributeArray_int64, 163);
BURNISH_AT(ShapeInferContext_SetOutputTypeShape, 270);
BURNISH_AT(ReadOpAttr, 272);
BURNISH_AT(KernelContext_ParallelFor, 274);
#undef BURNISH_AT
