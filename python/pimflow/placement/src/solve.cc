/*!
 * \file solve.cc
 * \brief The label-setting search as a function of tvm-ffi.
 */
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/tvm_ffi.h>

#include "label_search.h"
#include "minimise.h"

namespace pimflow {
namespace {

namespace ffi = tvm::ffi;
using placement::Clock;

constexpr int kCriterionFields = 7;

/*! \brief A problem that is read once, and may be searched many times. */
class ProblemObj : public ffi::Object {
 public:
  explicit ProblemObj(const placement::Arrays::Map& arrays) : problem(placement::Arrays(arrays)) {}
  const placement::Problem problem;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("pimflow.placement.Problem", ProblemObj, ffi::Object);
};

class ProblemRef : public ffi::ObjectRef {
 public:
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NULLABLE(ProblemRef, ffi::ObjectRef, ProblemObj);
};

ffi::Any MakeProblem(placement::Arrays::Map arrays) {
  return ProblemRef(ffi::make_object<ProblemObj>(arrays));
}

ffi::Array<ffi::Any> ToArrays(const placement::Result& result, bool all) {
  ffi::Array<ffi::Any> plans;
  for (const placement::Solution& solution : result.solutions) {
    ffi::Array<double> values(solution.values.begin(), solution.values.end());
    ffi::Array<int64_t> candidates;
    for (int candidate : solution.candidates) candidates.push_back(candidate);
    plans.push_back(ffi::Array<ffi::Any>{solution.latency_ns, solution.pool_bytes, values, candidates});
    if (!all) break;
  }
  return {plans, result.bound, result.dropped_bound, result.labels, result.max_labels_at_position};
}

/*!
 * \brief Search.
 * \param criteria float64 [criteria, kCriterionFields], as the fields of `Criterion`; the first is minimised.
 * \param numbers max_memory_bytes, capacity_bytes, max_labels, compared_labels, seconds.
 * \param flags counts_memory, minimises_memory, only_gpu, front: whether to return all Pareto-optimal plans.
 * \return The plans, each as latency, pool, values and candidates; then the bound, the bound of dropped plans, the
 *   number of labels, and the largest number at a position.
 */
ffi::Array<ffi::Any> Search(ProblemRef ref, ffi::TensorView criteria, ffi::Array<double> numbers,
                            ffi::Array<bool> flags) {
  placement::Query query{};
  const double* row = static_cast<const double*>(criteria.data_ptr());
  for (int64_t i = 0; i < criteria.numel() / kCriterionFields; ++i, row += kCriterionFields) {
    query.criteria.push_back({row[0], row[1], row[2], row[3], row[4], row[5], row[6]});
  }
  query.max_memory_bytes = numbers[0];
  query.capacity_bytes = numbers[1];
  query.max_labels = static_cast<int64_t>(numbers[2]);
  query.compared_labels = static_cast<int64_t>(numbers[3]);
  query.seconds = numbers[4];
  query.counts_memory = flags[0];
  query.minimises_memory = flags[1];
  query.only_gpu = flags[2];
  const bool front = flags[3];
  const auto deadline =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(query.seconds));
  const std::function<void()> poll = [] {
    if (TVMFFIEnvCheckSignals() != 0) throw ffi::EnvErrorAlreadySet();
  };
  placement::LabelSearch search(ref->problem, query, deadline, poll);
  if (front) return ToArrays(search.Run(0, false), true);
  return ToArrays(placement::Minimise(search, query), false);
}

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = tvm::ffi::reflection;
  refl::ObjectDef<ProblemObj>();
  refl::GlobalDef().def("pimflow.placement.problem", MakeProblem).def("pimflow.placement.search", Search);
}

}  // namespace
}  // namespace pimflow
