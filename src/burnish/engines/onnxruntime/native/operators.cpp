// The library that ONNX Runtime loads: every kernel that it has of burnish's own. Those of the files in the folder operators are
// compiled beside this one.

#include "elementwise_operators.h"
#include "synchronized_operators.h"

// ONNX Runtime calls it when a session registers the library.
extern "C" [[gnu::visibility("default")]] OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  const OrtApi* functions = base->GetApi(kInterfaceVersion);
  if (!functions) return nullptr;  // older than any that burnish takes
  burnish::api = functions;
  return burnish::guarded(functions, [&] {
    // As long as the process: sessions hold on to it.
    static OrtCustomOpDomain* domain = nullptr;
    if (!domain) {
      burnish::check_call(functions->CreateCustomOpDomain(burnish::kDomain, &domain));
      for (const OrtCustomOp* op : burnish::operators()) burnish::check_call(functions->CustomOpDomain_Add(domain, op));
    }
    burnish::check_call(functions->AddCustomOpDomain(options, domain));
  });
}
