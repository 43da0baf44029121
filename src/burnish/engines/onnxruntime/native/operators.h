// How ONNX Runtime calls operators: a kernel is made of each node, with the node's attributes, and runs with the values of a call. An
// operator here has any number of inputs and of outputs. It is a class with a constructor of Attributes, a function `run` of a Call, and one
// that tells the element types and shapes of its outputs before any run:
//
//   struct Name { explicit Name(const Attributes&); void run(Call&) const; static void infer(Inference&); };
//   static const Operator<Name> name("Name");

#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "engine_tensor.h"

namespace burnish {

constexpr char kDomain[] = "burnish";

inline ScalarType scalar_type_of(int64_t onnx_type) {
  switch (onnx_type) {
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT: return kFloat;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64: return kLong;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL: return kBool;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE: return kDouble;
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16: return kBFloat16;
    default: refuse({"a kernel of burnish has no elements of ONNX's type number ", onnx_type});
  }
}

inline ONNXTensorElementDataType onnx_type_of(const OrtTensorTypeAndShapeInfo* information) {
  ONNXTensorElementDataType type;
  check_call(api->GetTensorElementType(information, &type));
  return type;
}

inline std::vector<int64_t> sizes_of(const OrtTensorTypeAndShapeInfo* information) {
  size_t rank;
  check_call(api->GetDimensionsCount(information, &rank));
  std::vector<int64_t> sizes(rank);
  check_call(api->GetDimensions(information, sizes.data(), rank));
  return sizes;
}

// Type and shape of a tensor, which are released with this.
struct Information {
  OrtTensorTypeAndShapeInfo* held = nullptr;

  Information() = default;
  Information(const Information&) = delete;
  Information& operator=(const Information&) = delete;
  ~Information() {
    if (held) api->ReleaseTensorTypeAndShapeInfo(held);
  }
};

// Of the node that a kernel is made of.
class Attributes {
 public:
  explicit Attributes(const OrtKernelInfo* information) : information_(information) {}

  int64_t number(const char* name) const {
    int64_t value;
    check_call(api->KernelInfoGetAttribute_int64(information_, name, &value));
    return value;
  }

  // What a node without the attribute means by that is `otherwise`.
  int64_t number(const char* name, int64_t otherwise) const {
    int64_t value;
    OrtStatus* status = api->KernelInfoGetAttribute_int64(information_, name, &value);
    if (!status) return value;
    api->ReleaseStatus(status);
    return otherwise;
  }

  double real(const char* name) const {
    float value;
    check_call(api->KernelInfoGetAttribute_float(information_, name, &value));
    return value;
  }

  std::vector<int64_t> numbers(const char* name) const { return all<int64_t>(name, api->KernelInfoGetAttributeArray_int64); }
  std::vector<float> floats(const char* name) const { return all<float>(name, api->KernelInfoGetAttributeArray_float); }

 private:
  template <typename Number>
  std::vector<Number> all(const char* name, OrtStatus* (*read)(const OrtKernelInfo*, const char*, Number*, size_t*)) const {
    size_t count = 0;
    check_call(read(information_, name, nullptr, &count));
    std::vector<Number> values(count);
    check_call(read(information_, name, values.data(), &count));
    return values;
  }

  const OrtKernelInfo* information_;
};

// One run of a kernel.
class Call {
 public:
  explicit Call(OrtKernelContext* context) : context_(context) { running = context; }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  ~Call() { running = nullptr; }

  OrtKernelContext* context() const { return context_; }

  size_t input_count() const {
    size_t count;
    check_call(api->KernelContext_GetInputCount(context_, &count));
    return count;
  }

  Tensor input(size_t index) const {
    const OrtValue* value;
    check_call(api->KernelContext_GetInput(context_, index, &value));
    Information information;
    check_call(api->GetTensorTypeAndShape(value, &information.held));
    std::vector<int64_t> sizes = sizes_of(information.held);
    return Tensor(data_of(const_cast<OrtValue*>(value)), sizes, strides_of(sizes), scalar_type_of(onnx_type_of(information.held)));
  }

  std::vector<Tensor> inputs() const {
    std::vector<Tensor> tensors;
    size_t count = input_count();
    tensors.reserve(count);
    for (size_t index = 0; index < count; ++index) tensors.push_back(input(index));
    return tensors;
  }

  size_t output_count() const {
    size_t count;
    check_call(api->KernelContext_GetOutputCount(context_, &count));
    return count;
  }

  // The output of this place, in memory of ONNX Runtime's.
  Tensor output(size_t index, Sizes sizes, ScalarType type) const {
    OrtValue* value;
    check_call(api->KernelContext_GetOutput(context_, index, sizes.data(), sizes.size(), &value));
    return Tensor(data_of(value), sizes, strides_of(sizes), type);
  }

 private:
  static void* data_of(OrtValue* value) {
    void* data;
    check_call(api->GetTensorMutableData(value, &data));
    return data;
  }

  OrtKernelContext* context_;
};

// An extent of a shape that is known before any run: a number, or -1 and a name, which may be empty.
struct Extent {
  int64_t number;
  std::string name;

  bool is_known() const { return number >= 0; }
};

// What ONNX Runtime knows of a node before any run.
class Inference {
 public:
  explicit Inference(OrtShapeInferContext* context) : context_(context) {}

  size_t input_count() const {
    size_t count;
    check_call(api->ShapeInferContext_GetInputCount(context_, &count));
    return count;
  }

  std::vector<Extent> shape(size_t input) const {
    OrtTensorTypeAndShapeInfo* information;  // stays the context's
    check_call(api->ShapeInferContext_GetInputTypeShape(context_, input, &information));
    std::vector<int64_t> sizes = sizes_of(information);
    std::vector<const char*> names(sizes.size(), nullptr);
    check_call(api->GetSymbolicDimensions(information, names.data(), names.size()));
    std::vector<Extent> shape;
    for (size_t axis = 0; axis < sizes.size(); ++axis) shape.push_back({sizes[axis], names[axis] ? names[axis] : ""});
    return shape;
  }

  int64_t number(const char* name) const {
    int64_t value;
    size_t bytes;
    check_call(api->ReadOpAttr(attribute(name), ORT_OP_ATTR_INT, &value, sizeof value, &bytes));
    return value;
  }

  int64_t number(const char* name, int64_t otherwise) const {
    const OrtOpAttr* held;
    OrtStatus* status = api->ShapeInferContext_GetAttribute(context_, name, &held);
    if (!status) return number(name);
    api->ReleaseStatus(status);
    return otherwise;
  }

  std::vector<int64_t> numbers(const char* name) const {
    size_t bytes = 0;
    const OrtOpAttr* held = attribute(name);
    // Fails where there is no room, and says how much it takes.
    if (OrtStatus* status = api->ReadOpAttr(held, ORT_OP_ATTR_INTS, nullptr, 0, &bytes)) api->ReleaseStatus(status);
    std::vector<int64_t> values(bytes / sizeof(int64_t));
    if (bytes) check_call(api->ReadOpAttr(held, ORT_OP_ATTR_INTS, values.data(), bytes, &bytes));
    return values;
  }

  void set_output(size_t index, int64_t onnx_type, const std::vector<Extent>& shape) const {
    // A name of its own for what has none: those of the same name are taken to be equal, and -1 for a number.
    static std::atomic<int64_t> unnamed{0};
    std::vector<int64_t> sizes;
    std::vector<std::string> names;
    for (const Extent& extent : shape) {
      sizes.push_back(extent.number);
      bool is_unnamed = !extent.is_known() && extent.name.empty();
      names.push_back(extent.is_known() ? "" : is_unnamed ? "burnish_unknown_" + std::to_string(unnamed++) : extent.name);
    }
    std::vector<const char*> pointers;
    for (const std::string& name : names) pointers.push_back(name.c_str());
    Information information;
    check_call(api->CreateTensorTypeAndShapeInfo(&information.held));
    check_call(api->SetTensorElementType(information.held, static_cast<ONNXTensorElementDataType>(onnx_type)));
    check_call(api->SetDimensions(information.held, sizes.data(), sizes.size()));
    check_call(api->SetSymbolicDimensions(information.held, pointers.data(), pointers.size()));
    check_call(api->ShapeInferContext_SetOutputTypeShape(context_, index, information.held));
  }

 private:
  const OrtOpAttr* attribute(const char* name) const {
    const OrtOpAttr* attribute;
    check_call(api->ShapeInferContext_GetAttribute(context_, name, &attribute));
    return attribute;
  }

  OrtShapeInferContext* context_;
};

// Runs `body`; what it throws becomes a status of ONNX Runtime's, which raises it in Python.
template <typename Body>
OrtStatus* guarded(const OrtApi* functions, const Body& body) {
  try {
    body();
    return nullptr;
  } catch (const std::exception& error) {
    return functions->CreateStatus(ORT_RUNTIME_EXCEPTION, error.what());
  } catch (...) {
    return functions->CreateStatus(ORT_FAIL, "a kernel of burnish failed");
  }
}

// All operators of the library, in the order of their declaration.
inline std::vector<const OrtCustomOp*>& operators() {
  static std::vector<const OrtCustomOp*> all;
  return all;
}

template <typename Kernel>
class Operator : public OrtCustomOp {
 public:
  explicit Operator(const char* name) : OrtCustomOp{}, name_(name) {
    version = kInterfaceVersion;
    GetName = [](const OrtCustomOp* op) { return static_cast<const Operator*>(op)->name_; };
    GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };
    GetInputType = GetOutputType = [](const OrtCustomOp*, size_t) { return ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED; };
    GetInputTypeCount = GetOutputTypeCount = [](const OrtCustomOp*) -> size_t { return 1; };
    GetInputCharacteristic = GetOutputCharacteristic = [](const OrtCustomOp*, size_t) { return INPUT_OUTPUT_VARIADIC; };
    GetInputMemoryType = [](const OrtCustomOp*, size_t) { return OrtMemTypeDefault; };
    GetVariadicInputMinArity = GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 1; };
    GetVariadicInputHomogeneity = GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 0; };
    GetStartVersion = [](const OrtCustomOp*) { return 1; };
    GetEndVersion = [](const OrtCustomOp*) { return 1 << 20; };
    CreateKernelV2 = [](const OrtCustomOp*, const OrtApi* functions, const OrtKernelInfo* information, void** kernel) {
      return guarded(functions, [&] { *kernel = new Kernel(Attributes(information)); });
    };
    KernelComputeV2 = [](void* kernel, OrtKernelContext* context) {
      return guarded(api, [&] {
        Call call(context);
        static_cast<const Kernel*>(kernel)->run(call);
      });
    };
    KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
    InferOutputShapeFn = [](const OrtCustomOp*, OrtShapeInferContext* context) {
      return guarded(api, [&] {
        Inference inference(context);
        Kernel::infer(inference);
      });
    };
    operators().push_back(this);
  }

 private:
  const char* name_;
};

}  // namespace burnish
