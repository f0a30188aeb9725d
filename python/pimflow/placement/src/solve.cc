/*!
 * \file solve.cc
 * \brief The label-setting search as a function of tvm-ffi.
 */
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/tvm_ffi.h>

#include "label_search.h"

namespace pimflow {
namespace {

namespace ffi = tvm::ffi;

/*! \brief A problem that is read once, and may be searched many times. */
class ProblemObj : public ffi::Object {
 public:
  explicit ProblemObj(const placement::Tables& tables) : problem(tables) {}
  const placement::Problem problem;
  mutable placement::TailCache tails;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("pimflow.placement.Problem", ProblemObj, ffi::Object);
};

class ProblemRef : public ffi::ObjectRef {
 public:
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NULLABLE(ProblemRef, ffi::ObjectRef, ProblemObj);
};

ffi::Any MakeProblem(const placement::Tables& tables) { return ProblemRef(ffi::make_object<ProblemObj>(tables)); }

using Fields = ffi::Map<ffi::String, ffi::Any>;

Fields ToFields(const placement::Result& result, bool all) {
  ffi::Array<ffi::Any> plans;
  for (const placement::Solution& solution : result.solutions) {
    ffi::Array<int64_t> candidates;
    for (int candidate : solution.candidates) candidates.push_back(candidate);
    ffi::Array<double> values(solution.values.begin(), solution.values.end());
    plans.push_back(Fields{{"latency_ns", solution.latency_ns},
                           {"pool_bytes", solution.pool_bytes},
                           {"values", values},
                           {"candidates", candidates}});
    if (!all) break;
  }
  return {{"plans", plans},
          {"bound", result.bound},
          {"dropped_bound", result.dropped_bound},
          {"labels", result.labels},
          {"max_labels", result.max_labels_at_position}};
}

/*!
 * \brief Search.
 * \param options, limits `QueryOptions`, `QueryLimits`.
 * \param criteria `Criterion`, a row each; the first is minimised.
 * \return The plans, the best first: one, or all if a front is required; the bound, and that of dropped plans; the
 *   number of labels, and the largest number at a position.
 */
Fields Search(ProblemRef ref, ffi::TensorView options, ffi::TensorView limits, ffi::TensorView criteria) {
  const RecordTable<placement::Criterion> table(criteria);
  const placement::Query query{ReadRecord<placement::QueryOptions>(options),
                               ReadRecord<placement::QueryLimits>(limits),
                               {table.begin(), table.end()}};
  const placement::Deadline deadline(query.seconds);
  const std::function<void()> poll = [] {
    if (TVMFFIEnvCheckSignals() != 0) throw ffi::EnvErrorAlreadySet();
  };
  const placement::MakeSearch make_search = [&](bool searches) {
    placement::SegmentTails tails = ref->tails.Find(ref->problem, query, deadline, poll, searches);
    return std::make_unique<placement::LabelSearch>(ref->problem, query, deadline, poll, std::move(tails));
  };
  return query.front ? ToFields(make_search(true)->Run(0), true)
                     : ToFields(placement::Minimise(make_search, query), false);
}

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = tvm::ffi::reflection;
  refl::ObjectDef<ProblemObj>();
  DefineRecord<placement::ProblemHeader>("pimflow.placement.header");
  DefineRecord<placement::NumberRow>("pimflow.placement.number");
  DefineRecord<placement::TaskRow>("pimflow.placement.task");
  DefineRecord<placement::CandidateRow>("pimflow.placement.candidate");
  DefineRecord<placement::AllocationStep>("pimflow.placement.step");
  DefineRecord<placement::ResultLayout>("pimflow.placement.layout");
  DefineRecord<placement::RegionRow>("pimflow.placement.region");
  DefineRecord<placement::ReadCost>("pimflow.placement.read_cost");
  DefineRecord<placement::OperandRow>("pimflow.placement.operand");
  DefineRecord<placement::InputCopy>("pimflow.placement.input_copy");
  DefineRecord<placement::ReadingRow>("pimflow.placement.reading");
  DefineRecord<placement::GroupRow>("pimflow.placement.group");
  DefineRecord<placement::QueryOptions>("pimflow.placement.query_options");
  DefineRecord<placement::QueryLimits>("pimflow.placement.query_limits");
  DefineRecord<placement::Criterion>("pimflow.placement.criterion");
  refl::GlobalDef().def("pimflow.placement.problem", MakeProblem).def("pimflow.placement.search", Search);
}

}  // namespace
}  // namespace pimflow
