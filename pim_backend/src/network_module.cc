/*!
 * \brief Module of a compiled network with its interface, which `export_library` writes and `load_module` reads.
 *
 * It imports the virtual machine's executable. "default"(device) returns an executor with the functions of TVM's
 * graph executor: set_input, run, get_output and others.
 */
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/dtype.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/tvm_ffi.h>

#include <string>
#include <vector>

#include "serial.h"

namespace pimflow {
namespace {

namespace ffi = tvm::ffi;

// A process that has not imported pimflow prints the kind in its error about a missing loader.
#define PIMFLOW_NETWORK_KIND "pimflow (import pimflow first)"
constexpr uint64_t kNetworkMagic = 0x3130544e4d4950ull;  // "PIMNT01"
constexpr int kPooled = 2;                        // VirtualMachine.POOLED_ALLOCATOR in TVM

struct Input {
  std::string name, dtype;
  std::vector<int64_t> shape;
};

struct Interface {
  std::vector<Input> inputs;
  int64_t outputs = 0;
  std::string target;
  int64_t device_type = kDLCPU;
  std::string unsupported_reason;  // reason why it cannot run; empty if it can
};

/*! \brief Executor: inputs, results and the virtual machine of a network on a device. */
class ExecutorObj : public ffi::ModuleObj {
 public:
  ExecutorObj(const Interface& interface, ffi::Module machine, DLDevice device)
      : interface_(interface), machine_(machine), main_(machine->GetFunction("main").value()) {
    static ffi::Function alloc = ffi::Function::GetGlobalRequired("runtime.TVMTensorAllocWithScope");
    for (const Input& input : interface_.inputs) {
      ffi::Shape shape(input.shape.begin(), input.shape.end());
      DLDataType dtype = ffi::StringToDLDataType(input.dtype);
      values_.push_back(alloc(shape, dtype, device, nullptr).cast<ffi::Tensor>());
    }
    is_set_.resize(values_.size());
  }

  const char* kind() const final { return "pimflow executor"; }
  int GetPropertyMask() const final { return ffi::Module::kRunnable; }

  ffi::Optional<ffi::Function> GetFunction(const ffi::String& name) final {
    auto self = ffi::GetObjectPtr<ExecutorObj>(this);
    if (name == "set_input") {
      return ffi::Function::FromTyped([self](ffi::Any key, ffi::Tensor value) {
        static ffi::Function copy = ffi::Function::GetGlobalRequired("runtime.TVMTensorCopyFromTo");
        const size_t index = self->Index(key);
        self->CheckInput(index, value);
        copy(value, self->values_[index]);
        self->is_set_[index] = true;
      });
    }
    if (name == "set_input_zero_copy") {  // takes the tensor itself, so that steps of a network can share a cache
      return ffi::Function::FromTyped([self](ffi::Any key, ffi::Tensor value) {
        const size_t index = self->Index(key);
        self->CheckInput(index, value);
        const DLDevice input_device = self->values_[index].device(), value_device = value.device();
        TVM_FFI_ICHECK(value.IsContiguous() && value_device.device_type == input_device.device_type &&
                       value_device.device_id == input_device.device_id)
            << "input '" << self->interface_.inputs[index].name << "' lies elsewhere, or in pieces";
        self->values_[index] = value;
        self->is_set_[index] = true;
      });
    }
    if (name == "get_input") {
      return ffi::Function::FromTyped([self](ffi::Any key) { return self->values_[self->Index(key)]; });
    }
    if (name == "get_input_index") {
      return ffi::Function::FromTyped([self](ffi::String key) { return self->Find(key); });
    }
    if (name == "get_input_names") {
      return ffi::Function::FromTyped([self]() {
        ffi::Array<ffi::String> names;
        for (const Input& input : self->interface_.inputs) names.push_back(input.name);
        return names;
      });
    }
    if (name == "get_num_inputs") {
      return ffi::Function::FromTyped([self]() { return static_cast<int64_t>(self->values_.size()); });
    }
    if (name == "get_num_outputs") {
      return ffi::Function::FromTyped([self]() { return self->interface_.outputs; });
    }
    if (name == "get_output") {
      return ffi::Function::FromTyped([self](int64_t index) { return self->Output(index); });
    }
    if (name == "run") {
      return ffi::Function::FromTyped([self]() { self->Run(); });
    }
    return std::nullopt;
  }

 private:
  int64_t Find(const ffi::String& name) const {
    for (size_t i = 0; i < interface_.inputs.size(); ++i) {
      if (name == interface_.inputs[i].name) return i;
    }
    return -1;
  }

  size_t Index(const ffi::Any& key) const {
    if (auto name = key.try_cast<ffi::String>()) {
      const int64_t index = Find(*name);
      if (index < 0) TVM_FFI_THROW(ArtifactError) << "no input '" << *name << "'; inputs are " << Names();
      return index;
    }
    const int64_t index = key.cast<int64_t>();
    if (index < 0 || index >= static_cast<int64_t>(values_.size())) {
      TVM_FFI_THROW(ArtifactError) << "no input " << index << "; there are " << values_.size();
    }
    return index;
  }

  void CheckInput(size_t index, const ffi::Tensor& value) const {
    const ffi::Tensor& expected = values_[index];
    bool is_equal = value.ndim() == expected.ndim() && value.dtype() == expected.dtype();
    for (int i = 0; is_equal && i < value.ndim(); ++i) is_equal = value.size(i) == expected.size(i);
    if (!is_equal) {
      TVM_FFI_THROW(ArtifactError) << "input '" << interface_.inputs[index].name << "' has shape " << expected.shape()
                                   << " and dtype " << ffi::DLDataTypeToString(expected.dtype()) << ", not "
                                   << value.shape() << " " << ffi::DLDataTypeToString(value.dtype());
    }
  }

  void Run() {
    std::vector<ffi::AnyView> args(values_.begin(), values_.end());
    for (size_t i = 0; i < is_set_.size(); ++i) {
      if (!is_set_[i]) { TVM_FFI_THROW(ArtifactError) << "input '" << interface_.inputs[i].name << "' was not set"; }
    }
    outputs_.clear();  // they lie in the pool of the last run, which this run reuses
    ffi::Any result;
    static ffi::Function can_capture_kernels = ffi::Function::GetGlobalRequired("pimflow.runtime.can_capture_kernels");
    const bool could_capture = can_capture_kernels().cast<bool>();
    try {
      main_.CallPacked(args.data(), static_cast<int32_t>(args.size()), &result);
    } catch (const ffi::Error&) {
      if (!could_capture || can_capture_kernels().cast<bool>()) throw;
      main_.CallPacked(args.data(), static_cast<int32_t>(args.size()), &result);  // without CUDA graphs
    }
    if (auto tensor = result.try_cast<ffi::Tensor>()) {
      outputs_.push_back(*tensor);
    } else {
      for (const ffi::Any& output : result.cast<ffi::Array<ffi::Any>>()) {
        outputs_.push_back(output.cast<ffi::Tensor>());
      }
    }
  }

  ffi::Tensor Output(int64_t index) const {
    if (outputs_.empty()) TVM_FFI_THROW(ArtifactError) << "no output yet; call run first";
    if (index < 0 || index >= static_cast<int64_t>(outputs_.size())) {
      TVM_FFI_THROW(ArtifactError) << "no output " << index << "; there are " << outputs_.size();
    }
    return outputs_[index];
  }

  std::string Names() const {
    std::string names;
    for (const Input& input : interface_.inputs) names += (names.empty() ? "" : ", ") + input.name;
    return names;
  }

  Interface interface_;
  ffi::Module machine_;
  ffi::Function main_;
  std::vector<ffi::Tensor> values_, outputs_;
  std::vector<bool> is_set_;
};

class NetworkModuleObj : public ffi::ModuleObj {
 public:
  explicit NetworkModuleObj(Interface interface) : interface_(std::move(interface)) {}

  const char* kind() const final { return PIMFLOW_NETWORK_KIND; }
  int GetPropertyMask() const final {
    return ffi::Module::kBinarySerializable | ffi::Module::kRunnable;
  }

  ffi::Optional<ffi::Function> GetFunction(const ffi::String& name) final {
    auto self = ffi::GetObjectPtr<NetworkModuleObj>(this);
    if (name == "default") {
      return ffi::Function::FromTyped([self](DLDevice device) { return self->Executor(device); });
    }
    if (name == "get_target") {
      return ffi::Function::FromTyped([self]() { return ffi::String(self->interface_.target); });
    }
    return std::nullopt;
  }

  ffi::Bytes SaveToBytes() const final {
    Writer w;
    w.Put(kNetworkMagic);
    w.Put<uint64_t>(interface_.inputs.size());
    for (const Input& input : interface_.inputs) {
      w.PutAll(input.name);
      w.PutAll(input.dtype);
      w.PutAll(input.shape);
    }
    w.Put(interface_.outputs);
    w.PutAll(interface_.target);
    w.Put(interface_.device_type);
    w.PutAll(interface_.unsupported_reason);
    return ffi::Bytes(w.out);
  }

  static ffi::Module LoadFromBytes(const ffi::Bytes& bytes) {
    Reader r(bytes);
    if (r.Get<uint64_t>() != kNetworkMagic) {
      TVM_FFI_THROW(ArtifactError) << "a network of another version of pimflow: compile it again";
    }
    Interface interface;
    for (uint64_t i = r.Get<uint64_t>(); i > 0; --i) {
      Input input;
      r.GetAll(&input.name);
      r.GetAll(&input.dtype);
      r.GetAll(&input.shape);
      interface.inputs.push_back(std::move(input));
    }
    interface.outputs = r.Get<int64_t>();
    r.GetAll(&interface.target);
    interface.device_type = r.Get<int64_t>();
    r.GetAll(&interface.unsupported_reason);
    return ffi::Module(ffi::make_object<NetworkModuleObj>(std::move(interface)));
  }

 private:
  ffi::Module Executor(DLDevice device) {
    if (device.device_type != interface_.device_type) {
      const char* expected = interface_.device_type == kDLCPU ? "tvm.cpu()" : "tvm.cuda()";
      TVM_FFI_THROW(ArtifactError) << "built for target '" << interface_.target << "', which runs on " << expected
                                   << "; give that device, or build for another target";
    }
    if (!interface_.unsupported_reason.empty()) TVM_FFI_THROW(ArtifactError) << interface_.unsupported_reason;
    static ffi::Function attr = ffi::Function::GetGlobalRequired("runtime.GetDeviceAttr");
    const int type = device.device_type, id = device.device_id;
    auto exists = attr(type, id, 0).try_cast<int64_t>();
    if (!exists || *exists == 0) {
      TVM_FFI_THROW(ArtifactError) << "target '" << interface_.target
                                   << "' needs a CUDA device, and there is none; run or build for "
                                      "target 'llvm+pim'";
    }
    ffi::Module executable = imports()[0].cast<ffi::Module>();
    auto machine = executable->GetFunction("vm_load_executable").value()().cast<ffi::Module>();
    ffi::Function initialise = machine->GetFunction("vm_initialization").value();
    const int host = kDLCPU;  // last: it computes shapes
    if (type == host) {
      initialise(type, id, kPooled);
    } else {
      initialise(type, id, kPooled, host, 0, kPooled);
    }
    return ffi::Module(ffi::make_object<ExecutorObj>(interface_, machine, device));
  }

  Interface interface_;
};

/*! \brief A module that holds the saved bytes of another library's module, for a process that has its loader. */
class SavedModuleObj : public ffi::ModuleObj {
 public:
  SavedModuleObj(std::string kind, ffi::Bytes bytes) : kind_(std::move(kind)), bytes_(std::move(bytes)) {}
  const char* kind() const final { return kind_.c_str(); }
  int GetPropertyMask() const final { return ffi::Module::kBinarySerializable; }
  ffi::Optional<ffi::Function> GetFunction(const ffi::String&) final { return std::nullopt; }
  ffi::Bytes SaveToBytes() const final { return bytes_; }

 private:
  std::string kind_;
  ffi::Bytes bytes_;
};

ffi::Module SavedModule(ffi::String kind, ffi::Bytes bytes) {
  return ffi::Module(ffi::make_object<SavedModuleObj>(std::string(kind), bytes));
}

ffi::Bytes SaveModule(ffi::Module module) { return module->SaveToBytes(); }

/*!
 * \brief A network module over an executable.
 * \param names, shapes, dtypes Those of the inputs, in order.
 * \param flaw Reason why it cannot be executed; empty if it can.
 */
ffi::Module CreateNetwork(ffi::Module executable, ffi::Array<ffi::String> names, ffi::Array<ffi::Shape> shapes,
                          ffi::Array<ffi::String> dtypes, int64_t outputs, ffi::String target, int64_t device_type,
                          ffi::String unsupported_reason) {
  Interface interface;
  for (size_t i = 0; i < names.size(); ++i) {
    std::vector<int64_t> shape(shapes[i].begin(), shapes[i].end());
    interface.inputs.push_back({std::string(names[i]), std::string(dtypes[i]), shape});
  }
  interface.outputs = outputs;
  interface.target = target;
  interface.device_type = device_type;
  interface.unsupported_reason = unsupported_reason;
  ffi::Module network(ffi::make_object<NetworkModuleObj>(std::move(interface)));
  network->ImportModule(executable);
  return network;
}

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = tvm::ffi::reflection;
  refl::GlobalDef()
      .def("pimflow.runtime.create_network", CreateNetwork)
      .def("pimflow.runtime.saved_module", SavedModule)
      .def("pimflow.runtime.save_module", SaveModule)
      .def("ffi.Module.load_from_bytes." PIMFLOW_NETWORK_KIND, NetworkModuleObj::LoadFromBytes);
}

}  // namespace
}  // namespace pimflow
