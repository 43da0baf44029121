// A call of a graph as autograd sees it, without the Python objects of a torch.autograd.Function: what is called in Python are the two
// passes alone. In all else a call does what such a function does: what the backward pass reads is saved in autograd's own way, with
// versions and hooks, and missing cotangents are zeros.

#include <Python.h>
#include <structmember.h>

#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <mutex>
#include <unordered_set>
#include <utility>
#include <vector>

namespace {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using Positions = std::vector<size_t>;

// A reference to a Python object, which whoever holds the interpreter's lock may drop.
class Reference {
 public:
  Reference() = default;
  explicit Reference(PyObject* owned) : object_(owned) {}
  Reference(Reference&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Reference& operator=(Reference&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Reference() { Py_XDECREF(object_); }

  static Reference to(PyObject* object) {
    Py_XINCREF(object);
    return Reference(object);
  }

  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }

 private:
  PyObject* object_ = nullptr;
};

// Throws where Python raised.
Reference checked(PyObject* owned) {
  if (!owned) {
    python_error error;
    error.persist();
    throw std::move(error);
  }
  return Reference(owned);
}

// What is known of a graph before it is called; "positions" are those of its inputs or outputs.
struct Plan {
  size_t inputs = 0, results = 0;
  Positions differentiated;  // of the outputs that cotangents come in for
  Positions constant;        // of the other outputs
  Positions reached;         // of the inputs whose gradients the backward pass returns
  std::vector<bool> image;   // by input: whether it is read with channels last
  std::vector<bool> written; // by input: whether the caller writes to it after the call
  std::vector<bool> kept;    // by input: whether it is written to, and a gradient of a gradient reads what it was
  bool channels_last = false;
  void (*serve)(int) = nullptr;  // lets large tensors come from the pages that are kept
};

struct Graph {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject *forward, *backward, *again, *failed;
  Plan* plan;
};

Graph* graph_of(PyObject* self) { return reinterpret_cast<Graph*>(self); }

class Served {
 public:
  explicit Served(void (*serve)(int)) : serve_(serve) {
    if (serve_) serve_(1);
  }
  ~Served() {
    if (serve_) serve_(0);
  }

 private:
  void (*serve_)(int);
};

// Lets the graph say where it failed, in place of what PyTorch raised.
void explain(Graph* graph, const char* stage) {
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  if (traceback) PyException_SetTraceback(value, traceback);
  Reference said(PyObject_CallFunction(graph->failed, "sO", stage, value));
  if (said.get()) {
    PyErr_Restore(type, value, traceback);
    return;
  }
  Py_XDECREF(type), Py_XDECREF(value), Py_XDECREF(traceback);
}

// The results of a pass, a tuple.
Reference run(Graph* graph, PyObject* pass, const std::vector<Reference>& arguments, const char* stage) {
  std::vector<PyObject*> borrowed(arguments.size() + 1, nullptr);
  for (size_t index = 0; index < arguments.size(); ++index) borrowed[index + 1] = arguments[index].get();
  PyObject* results;
  {
    Served served(graph->plan->serve);
    results = PyObject_Vectorcall(pass, borrowed.data() + 1, arguments.size() | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
  }
  if (!results) explain(graph, stage);
  Reference owned = checked(results);
  TORCH_CHECK(PyTuple_CheckExact(results), "the ", stage, " pass of a graph returns a tuple");
  return owned;
}

// A scope in which nothing is recorded.
struct Ungraded {
  at::AutoGradMode reverse{false};
  c10::AutoFwGradMode forward{false};
};

// A tensor as kernels read it.
at::Tensor laid_out(const at::Tensor& tensor, bool image) {
  auto format = image && tensor.is_floating_point() ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
  if (tensor.is_contiguous(format)) return tensor;
  pybind11::gil_scoped_release other_threads_go_on;
  return tensor.contiguous(format);
}

class GraphCall : public torch::autograd::Node {
 public:
  GraphCall(Graph* graph, torch::autograd::edge_list&& edges)
      : Node(std::move(edges)), graph_(Reference::to(reinterpret_cast<PyObject*>(graph))) {}

  ~GraphCall() override {
    if (!Py_IsInitialized()) {
      graph_.release();
      for (Reference& number : numbers_) number.release();
      return;
    }
    pybind11::gil_scoped_acquire lock;
    graph_ = Reference();
    numbers_.clear();
  }

  std::string name() const override { return "BurnishGraph"; }

  // Save what the backward pass reads, and the inputs for a gradient of the gradients.
  void save(PyObject* results, const variable_list& inputs) {
    const Plan& plan = *graph()->plan;
    for (Py_ssize_t index = Py_ssize_t(plan.results); index < PyTuple_GET_SIZE(results); ++index) {
      PyObject* value = PyTuple_GET_ITEM(results, index);
      if (THPVariable_Check(value)) {
        at::Tensor tensor = THPVariable_Unpack(value);
        for (size_t position = 0; position < inputs.size(); ++position)
          if (plan.written[position] && tensor.is_same(inputs[position])) {
            tensor = tensor.clone();
            break;
          }
        saved_.emplace_back(tensor, tensor.grad_fn().get() == this);
        numbers_.emplace_back();
      } else {
        numbers_.push_back(Reference::to(value));
      }
    }
    for (size_t position = 0; position < inputs.size(); ++position) {
      if (plan.written[position]) {
        written_.push_back(plan.kept[position] ? inputs[position].clone() : inputs[position]);
      } else {
        inputs_.emplace_back(inputs[position], false);
      }
    }
  }

  variable_list apply(variable_list&& cotangents) override {
    const bool again = at::GradMode::is_enabled();
    const Plan& plan = *graph()->plan;
    variable_list saved, inputs;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto self = getptr();
      TORCH_CHECK(!released_, torch::autograd::ERR_BACKWARD_TWICE);
      for (const SavedVariable& variable : again ? inputs_ : saved_) (again ? inputs : saved).push_back(variable.unpack(self));
      // The pass frees what it has read, and takes new memory from there: as much is never held as both take.
      if (!again && !torch::autograd::get_current_graph_task_keep_graph()) release();
    }
    for (size_t position : plan.differentiated)
      if (!cotangents[position].defined()) cotangents[position] = input_metadata(position).zeros_like();
    pybind11::gil_scoped_acquire lock;
    return again ? differentiated_again(inputs, cotangents) : differentiated(std::move(saved), std::move(cotangents));
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    release();
  }

 private:
  Graph* graph() const { return graph_of(graph_.get()); }

  // Whoever calls it has the lock.
  void release() {
    for (SavedVariable& variable : saved_) variable.reset_data();
    for (SavedVariable& variable : inputs_) variable.reset_data();
    written_.clear();
    released_ = true;
  }

  variable_list differentiated(variable_list&& saved, variable_list&& cotangents) {
    const Plan& plan = *graph()->plan;
    Reference read = checked(PyList_New(Py_ssize_t(numbers_.size() + plan.differentiated.size())));
    Py_ssize_t filled = 0;
    auto next = saved.begin();
    for (const Reference& number : numbers_)
      PyList_SET_ITEM(read.get(), filled++,
                      number.get() ? Py_NewRef(number.get()) : checked(THPVariable_Wrap(*next++)).release());
    saved.clear();
    for (size_t position : plan.differentiated) {
      const at::Tensor& cotangent = cotangents[position];
      const bool is_image = plan.channels_last && cotangent.dim() == 4;
      PyList_SET_ITEM(read.get(), filled++, checked(THPVariable_Wrap(laid_out(cotangent, is_image))).release());
    }
    cotangents.clear();
    std::vector<Reference> arguments;
    arguments.push_back(std::move(read));
    Reference results = run(graph(), graph()->backward, arguments, "backward");
    variable_list gradients(plan.inputs);
    TORCH_CHECK(size_t(PyTuple_GET_SIZE(results.get())) == plan.reached.size(), "the backward pass returns other gradients");
    for (size_t index = 0; index < plan.reached.size(); ++index)
      gradients[plan.reached[index]] = tensor_of(PyTuple_GET_ITEM(results.get(), Py_ssize_t(index)));
    return gradients;
  }

  variable_list differentiated_again(const variable_list& unwritten, const variable_list& cotangents) {
    const Plan& plan = *graph()->plan;
    Reference inputs = checked(PyTuple_New(Py_ssize_t(plan.inputs)));
    auto next = unwritten.begin(), next_written = std::as_const(written_).begin();
    for (size_t position = 0; position < plan.inputs; ++position) {
      const at::Tensor& input = plan.written[position] ? *next_written++ : *next++;
      PyTuple_SET_ITEM(inputs.get(), Py_ssize_t(position), checked(THPVariable_Wrap(input)).release());
    }
    Reference incoming = checked(PyTuple_New(Py_ssize_t(plan.differentiated.size())));
    for (size_t index = 0; index < plan.differentiated.size(); ++index)
      PyTuple_SET_ITEM(incoming.get(), Py_ssize_t(index),
                       checked(THPVariable_Wrap(cotangents[plan.differentiated[index]])).release());
    Reference results = checked(PyObject_CallFunctionObjArgs(graph()->again, inputs.get(), incoming.get(), nullptr));
    TORCH_CHECK(PyList_CheckExact(results.get()) && size_t(PyList_GET_SIZE(results.get())) == plan.inputs,
                "differentiated again, a graph returns a gradient for each input");
    variable_list gradients(plan.inputs);
    for (size_t position = 0; position < plan.inputs; ++position) {
      PyObject* gradient = PyList_GET_ITEM(results.get(), Py_ssize_t(position));
      if (gradient != Py_None) gradients[position] = tensor_of(gradient);
    }
    return gradients;
  }

  static at::Tensor tensor_of(PyObject* object) {
    TORCH_CHECK(THPVariable_Check(object), "a gradient of a graph is a tensor");
    return THPVariable_Unpack(object);
  }

  Reference graph_;
  std::vector<SavedVariable> saved_, inputs_;
  std::vector<Reference> numbers_;  // by what is saved: what is no tensor, and nothing for a tensor
  variable_list written_;
  bool released_ = false;
};

variable_list no_forward_mode(const variable_list&, const variable_list&) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "burnish's graphs have no forward mode of differentiation: use the reverse mode");
}

PyObject* call(PyObject* self, PyObject* const* arguments, size_t flags, PyObject* names) {
  HANDLE_TH_ERRORS
  Graph* graph = graph_of(self);
  const Plan& plan = *graph->plan;
  const size_t count = size_t(PyVectorcall_NARGS(flags));
  TORCH_CHECK_TYPE(count == plan.inputs && !(names && PyTuple_GET_SIZE(names)), "a graph of ", plan.inputs, " inputs got ", count);
  variable_list inputs;
  inputs.reserve(count);
  for (size_t index = 0; index < count; ++index) {
    TORCH_CHECK_TYPE(THPVariable_Check(arguments[index]), "input ", index, " of a graph is no tensor");
    inputs.push_back(THPVariable_Unpack(arguments[index]));
  }
  auto node = c10::make_intrusive<GraphCall>(graph, torch::autograd::collect_next_edges(inputs));
  Reference results;
  {
    Ungraded without_gradients;
    std::vector<Reference> read;
    read.reserve(count);
    for (size_t index = 0; index < count; ++index) {
      at::Tensor tensor = laid_out(inputs[index], plan.image[index]);
      read.push_back(tensor.is_same(inputs[index]) ? Reference::to(arguments[index]) : checked(THPVariable_Wrap(tensor)));
    }
    results = run(graph, graph->forward, read, "forward");
  }
  TORCH_CHECK(size_t(PyTuple_GET_SIZE(results.get())) >= plan.results, "the forward pass returns fewer outputs");
  std::vector<std::optional<at::Tensor>> raw;
  for (size_t index = 0; index < plan.results; ++index) {
    PyObject* output = PyTuple_GET_ITEM(results.get(), Py_ssize_t(index));
    TORCH_CHECK(THPVariable_Check(output), "output ", index, " of a graph is no tensor");
    raw.emplace_back(THPVariable_Unpack(output));
  }
  std::unordered_set<at::TensorImpl*> constant;
  for (size_t index : plan.constant) constant.insert(raw[index]->unsafeGetTensorImpl());
  auto view_of_itself = [](at::Tensor tensor) { return tensor.view_as(tensor); };
  auto outputs = torch::autograd::_wrap_outputs(inputs, constant, {}, raw, node, no_forward_mode, {}, view_of_itself, false);
  Ungraded without_gradients;
  node->save(results.get(), inputs);
  Reference returned = checked(PyTuple_New(Py_ssize_t(plan.results)));
  for (size_t index = 0; index < plan.results; ++index)
    PyTuple_SET_ITEM(returned.get(), Py_ssize_t(index), checked(THPVariable_Wrap(*outputs[index])).release());
  return returned.release();
  END_HANDLE_TH_ERRORS
}

// The numbers of a sequence.
Positions positions_of(PyObject* sequence) {
  Reference items = checked(PySequence_Fast(sequence, "positions are a sequence"));
  Positions positions;
  for (Py_ssize_t index = 0; index < PySequence_Fast_GET_SIZE(items.get()); ++index) {
    size_t position = PyLong_AsSize_t(PySequence_Fast_GET_ITEM(items.get(), index));
    if (PyErr_Occurred()) checked(nullptr);
    positions.push_back(position);
  }
  return positions;
}

std::vector<bool> flags_of(PyObject* sequence, size_t count) {
  std::vector<bool> flags(count, false);
  for (size_t position : positions_of(sequence)) flags.at(position) = true;
  return flags;
}

PyObject* make(PyTypeObject* type, PyObject* arguments, PyObject* names) {
  HANDLE_TH_ERRORS
  static const char* keywords[] = {"forward", "backward", "again",   "failed", "inputs",        "results", "differentiated",
                                   "reached", "images",   "written", "kept",   "channels_last", "serve",   nullptr};
  PyObject *forward, *backward, *again, *failed, *differentiated, *reached, *images, *written, *kept;
  Py_ssize_t inputs, results;
  int channels_last;
  unsigned long long serve;
  if (!PyArg_ParseTupleAndKeywords(arguments, names, "$OOOOnnOOOOOpK", const_cast<char**>(keywords), &forward, &backward, &again,
                                   &failed, &inputs, &results, &differentiated, &reached, &images, &written, &kept, &channels_last,
                                   &serve))
    return nullptr;
  auto plan = std::make_unique<Plan>();
  plan->inputs = size_t(inputs), plan->results = size_t(results);
  plan->differentiated = positions_of(differentiated), plan->reached = positions_of(reached);
  std::vector<bool> has_cotangent = flags_of(differentiated, plan->results);
  for (size_t index = 0; index < plan->results; ++index)
    if (!has_cotangent[index]) plan->constant.push_back(index);
  flags_of(reached, plan->inputs);
  plan->image = flags_of(images, plan->inputs);
  plan->written = flags_of(written, plan->inputs), plan->kept = flags_of(kept, plan->inputs);
  plan->channels_last = channels_last != 0;
  plan->serve = reinterpret_cast<void (*)(int)>(static_cast<uintptr_t>(serve));
  PyObject* made = type->tp_alloc(type, 0);
  if (!made) return nullptr;
  Graph* graph = graph_of(made);
  graph->vectorcall = call;
  graph->forward = Py_NewRef(forward), graph->backward = Py_NewRef(backward);
  graph->again = Py_NewRef(again), graph->failed = Py_NewRef(failed);
  graph->plan = plan.release();
  return made;
  END_HANDLE_TH_ERRORS
}

int visit_all(PyObject* self, visitproc visit, void* arg) {
  Graph* graph = graph_of(self);
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(graph->forward);
  Py_VISIT(graph->backward);
  Py_VISIT(graph->again);
  Py_VISIT(graph->failed);
  return 0;
}

int clear(PyObject* self) {
  Graph* graph = graph_of(self);
  Py_CLEAR(graph->forward);
  Py_CLEAR(graph->backward);
  Py_CLEAR(graph->again);
  Py_CLEAR(graph->failed);
  return 0;
}

void forget(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clear(self);
  delete graph_of(self)->plan;
  type->tp_free(self);
  Py_DECREF(type);
}

PyMemberDef members[] = {{"__vectorcalloffset__", T_PYSSIZET, offsetof(Graph, vectorcall), READONLY, nullptr}, {}};

PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(make)},
                       {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                       {Py_tp_traverse, reinterpret_cast<void*>(visit_all)},
                       {Py_tp_clear, reinterpret_cast<void*>(clear)},
                       {Py_tp_dealloc, reinterpret_cast<void*>(forget)},
                       {Py_tp_members, members},
                       {0, nullptr}};

PyType_Spec specification = {"burnish.GraphCalls", sizeof(Graph), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, slots};

}  // namespace

// The Python type whose objects call a graph: made once in a process.
extern "C" [[gnu::visibility("default")]] PyObject* burnish_graph_calls() {
  static PyObject* type = PyType_FromSpec(&specification);
  Py_XINCREF(type);
  return type;
}
