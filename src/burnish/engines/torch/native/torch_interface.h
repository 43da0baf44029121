// The functions of PyTorch's stable C interface that kernels call, declared here: <torch/csrc/stable/...> declares them too, and takes
// a second and more of every compilation. They keep their names and arguments from one release of PyTorch to the next, so that what was
// compiled once runs with every release since kInterfaceVersion. Each returns zero, or anything else where it failed.

#pragma once

#include <cstddef>
#include <cstdint>

// The release whose way to call operators the kernels keep to, 2.10, as PyTorch writes it.
constexpr uint64_t kInterfaceVersion = uint64_t{2} << 56 | uint64_t{10} << 48;

extern "C" {

struct AtenTensorOpaque;
struct StableListOpaque;
struct TorchLibraryOpaque;

using AtenTensorHandle = AtenTensorOpaque*;
using StableListHandle = StableListOpaque*;
using TorchLibraryHandle = TorchLibraryOpaque*;
using StableIValue = uint64_t;  // a number, a flag, a handle, or where what may be missing lies

int32_t aoti_torch_device_type_cpu();
int32_t aoti_torch_memory_format_contiguous_format();
int32_t aoti_torch_memory_format_channels_last();

size_t aoti_torch_dtype_element_size(int32_t type);
int32_t aoti_torch_new_tensor_handle(AtenTensorHandle tensor, AtenTensorHandle* made);
int32_t aoti_torch_delete_tensor_object(AtenTensorHandle tensor);
int32_t aoti_torch_get_dim(AtenTensorHandle tensor, int64_t* dim);
int32_t aoti_torch_get_numel(AtenTensorHandle tensor, int64_t* numel);
int32_t aoti_torch_get_sizes(AtenTensorHandle tensor, int64_t** sizes);
int32_t aoti_torch_get_strides(AtenTensorHandle tensor, int64_t** strides);
int32_t aoti_torch_get_dtype(AtenTensorHandle tensor, int32_t* type);
int32_t aoti_torch_is_contiguous(AtenTensorHandle tensor, bool* contiguous);
int32_t torch_get_mutable_data_ptr(AtenTensorHandle tensor, void** data);
int32_t torch_get_const_data_ptr(AtenTensorHandle tensor, const void** data);
int32_t aoti_torch_empty_strided(int64_t dim, const int64_t* sizes, const int64_t* strides, int32_t type, int32_t device_type,
                                 int32_t device_index, AtenTensorHandle* made);
int32_t aoti_torch__reinterpret_tensor(AtenTensorHandle tensor, int64_t dim, const int64_t* sizes, const int64_t* strides,
                                       int64_t offset, AtenTensorHandle* made);
int32_t torch_call_dispatcher(const char* name, const char* overload, StableIValue* stack, uint64_t version);

int32_t torch_new_list_reserve_size(size_t size, StableListHandle* list);
int32_t torch_list_size(StableListHandle list, size_t* size);
int32_t torch_list_get_item(StableListHandle list, size_t index, StableIValue* item);
int32_t torch_list_push_back(StableListHandle list, StableIValue item);
int32_t torch_delete_list(StableListHandle list);

int32_t torch_parallel_for(int64_t begin, int64_t end, int64_t grain, void (*run)(int64_t, int64_t, void*), void* context);
int32_t torch_get_num_threads(uint32_t* threads);

int32_t aoti_torch_library_init_impl(const char* domain, const char* key, const char* file, uint32_t line, TorchLibraryHandle* library);
int32_t torch_library_impl(TorchLibraryHandle library, const char* name, void (*run)(StableIValue*, uint64_t, uint64_t),
                           uint64_t version);

// Since 2.13; null before.
[[gnu::weak]] const char* torch_exception_get_what_without_backtrace();
[[gnu::weak]] int32_t torch_delete_stable_ivalue(StableIValue* value);

int32_t aoti_torch_cpu_mm_out(AtenTensorHandle made, AtenTensorHandle left, AtenTensorHandle right);
int32_t aoti_torch_cpu_convolution(AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle* bias, const int64_t* strides,
                                   int64_t stride_count, const int64_t* padding, int64_t padding_count, const int64_t* dilations,
                                   int64_t dilation_count, int32_t transposed, const int64_t* output_padding,
                                   int64_t output_padding_count, int64_t groups, AtenTensorHandle* made);
int32_t aoti_torch_cpu_convolution_backward(AtenTensorHandle dy, AtenTensorHandle x, AtenTensorHandle weight, const int64_t** bias_sizes,
                                            int64_t bias_size_count, const int64_t* strides, int64_t stride_count,
                                            const int64_t* padding, int64_t padding_count, const int64_t* dilations,
                                            int64_t dilation_count, int32_t transposed, const int64_t* output_padding,
                                            int64_t output_padding_count, int64_t groups, const int32_t* wanted, int64_t wanted_count,
                                            AtenTensorHandle* dx, AtenTensorHandle* dw, AtenTensorHandle* dbias);
}
