/*!
 * \file serving.cc
 * \brief Continuous batching over simulated time: which requests each step of a server serves.
 *
 * `simulators/serving/scheduler.py` states the rules. All numbers are integers, so results are the same on every
 * machine.
 */
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/string.h>
#include <tvm/ffi/tvm_ffi.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../../python/pimflow/host/src/records.h"

namespace pimflow {
namespace {

namespace ffi = tvm::ffi;

PIMFLOW_RECORD(RequestRow, int64_t, arrival_ps, prompt_tokens, new_tokens, first_token_ps, finish_ps, preemptions);
PIMFLOW_RECORD(LimitRow, int64_t, max_batch, chunk_tokens, page_tokens, pages, context);
PIMFLOW_RECORD(SpanRow, int64_t, start_ps, end_ps, steps, decoding, attended, chunk_request, chunk_end, pages,
               energy_pj);
PIMFLOW_RECORD(EventRow, int64_t, span, request, kind);
PIMFLOW_RECORD(GapRow, int64_t, gap_ps, count);

enum EventKind : int64_t { kAdmit, kPreempt, kFinish };

/*! \brief A request that has pages. */
struct Running {
  int64_t request;
  int64_t cached;  // tokens in its cache
  int64_t target;  // tokens that its prefill puts there
  int64_t pages;
  bool is_decoding() const { return cached >= target; }
};

template <typename Row>
ffi::Bytes ToBytes(const std::vector<Row>& rows) {
  return ffi::Bytes(std::string(reinterpret_cast<const char*>(rows.data()), rows.size() * sizeof(Row)));
}

/*! \brief Times and energies of steps: of a prefill by its last position, of decoding by batch and mean context. */
struct StepTable {
  const int64_t *chunk, *decode;
  int64_t context;
  int64_t Chunk(int64_t end) const { return end ? chunk[end] : 0; }
  int64_t Decode(int64_t batch, int64_t attended) const {
    return batch ? decode[batch * (context + 1) + attended / batch] : 0;
  }
};

class Server {
 public:
  Server(RecordTable<RequestRow> requests, const LimitRow& limits, StepTable times_ps, StepTable energies_pj)
      : requests_(requests.begin()),
        count_(requests.size()),
        limits_(limits),
        times_ps_(times_ps),
        energies_pj_(energies_pj),
        free_pages_(limits.pages),
        generated_(count_),
        last_token_ps_(count_) {}

  ffi::Array<ffi::Bytes> Run() {
    for (int64_t steps = 0; next_ < count_ || !waiting_.empty() || !running_.empty(); ++steps) {
      if ((steps & 0xffff) == 0 && TVMFFIEnvCheckSignals() != 0) throw ffi::EnvErrorAlreadySet();
      while (next_ < count_ && requests_[next_].arrival_ps <= now_ps_) waiting_.push_back(next_++);
      if (waiting_.empty() && running_.empty()) {
        now_ps_ = requests_[next_].arrival_ps;
        continue;
      }
      first_event_ = events_.size();
      ReservePages();
      AdmitRequest();
      Step();
    }
    std::vector<GapRow> gaps;
    for (const auto& [gap_ps, count] : gaps_) gaps.push_back({gap_ps, count});
    std::sort(gaps.begin(), gaps.end(), [](const GapRow& a, const GapRow& b) { return a.gap_ps < b.gap_ps; });
    return {ToBytes(spans_), ToBytes(events_), ToBytes(gaps)};
  }

 private:
  int64_t PageCount(int64_t tokens) const { return (tokens + limits_.page_tokens - 1) / limits_.page_tokens; }

  void Record(EventKind kind, int64_t request) {
    events_.push_back({static_cast<int64_t>(spans_.size()), request, kind});
  }

  /*! \brief Give a page to each decoding request that needs one; if none is free, the last admitted give up theirs. */
  void ReservePages() {
    for (size_t i = 0; i < running_.size(); ++i) {
      if (!running_[i].is_decoding() || running_[i].cached + 1 <= running_[i].pages * limits_.page_tokens) continue;
      while (free_pages_ == 0 && i < running_.size()) Preempt();
      if (i == running_.size()) return;
      --free_pages_;
      ++running_[i].pages;
    }
  }

  void Preempt() {
    const Running last = running_.back();
    running_.pop_back();
    free_pages_ += last.pages;
    waiting_.push_front(last.request);
    ++requests_[last.request].preemptions;
    Record(kPreempt, last.request);
  }

  /*! \brief Begin the prefill of the request that waits first, if there is none yet and its pages are free. */
  void AdmitRequest() {
    if (waiting_.empty() || static_cast<int64_t>(running_.size()) >= limits_.max_batch) return;
    if (!running_.empty() && !running_.back().is_decoding()) return;
    const int64_t request = waiting_.front(), target = requests_[request].prompt_tokens + generated_[request];
    if (PageCount(target) > free_pages_) return;
    waiting_.pop_front();
    free_pages_ -= PageCount(target);
    running_.push_back({request, 0, target, PageCount(target)});
    Record(kAdmit, request);
  }

  /*! \brief A chunk of the prefill, if there is one, and a token of each decoding request. */
  void Step() {
    Running* prefill = running_.back().is_decoding() ? nullptr : &running_.back();
    const int64_t decoding = running_.size() - (prefill ? 1 : 0);
    int64_t attended = 0, chunk_end = 0;
    for (int64_t i = 0; i < decoding; ++i) attended += running_[i].cached + 1;
    if (prefill) chunk_end = std::min(prefill->target, prefill->cached + limits_.chunk_tokens);
    const int64_t start_ps = now_ps_;
    const int64_t duration_ps = times_ps_.Chunk(chunk_end) + times_ps_.Decode(decoding, attended);
    now_ps_ += duration_ps;
    const int64_t energy_pj = energies_pj_.Chunk(chunk_end) + energies_pj_.Decode(decoding, attended);
    const int64_t chunk_request = prefill ? prefill->request : -1;
    AppendSpan({start_ps, now_ps_, 1, decoding, attended, chunk_request, chunk_end, limits_.pages - free_pages_,
                energy_pj});
    if (decoding) gaps_[duration_ps] += decoding;
    for (int64_t i = 0; i < decoding; ++i) {
      ++running_[i].cached;
      AddToken(running_[i].request);
    }
    if (prefill) {
      prefill->cached = chunk_end;
      if (prefill->is_decoding()) {
        const int64_t request = prefill->request;
        if (generated_[request] == 0) {
          requests_[request].first_token_ps = now_ps_;
        } else {
          ++gaps_[now_ps_ - last_token_ps_[request]];
        }
        AddToken(request);
      }
    }
    if (has_finished_) RemoveFinished();
  }

  void AddToken(int64_t request) {
    last_token_ps_[request] = now_ps_;
    if (++generated_[request] == requests_[request].new_tokens) has_finished_ = true;
  }

  void RemoveFinished() {
    has_finished_ = false;
    auto is_finished = [this](const Running& entry) {
      return generated_[entry.request] == requests_[entry.request].new_tokens && entry.is_decoding();
    };
    for (const Running& entry : running_) {
      if (!is_finished(entry)) continue;
      requests_[entry.request].finish_ps = now_ps_;
      free_pages_ += entry.pages;
      events_.push_back({static_cast<int64_t>(spans_.size()) - 1, entry.request, kFinish});
    }
    running_.erase(std::remove_if(running_.begin(), running_.end(), is_finished), running_.end());
    is_closed_ = true;
  }

  /*! \brief Append a step; one that decodes the same requests as the span before is a step of that span. */
  void AppendSpan(const SpanRow& step) {
    const bool is_same = !spans_.empty() && !is_closed_ && first_event_ == events_.size() && step.chunk_end == 0 &&
                         spans_.back().chunk_end == 0 && spans_.back().end_ps == step.start_ps;
    is_closed_ = false;
    if (!is_same) {
      spans_.push_back(step);
      return;
    }
    SpanRow& span = spans_.back();
    span.end_ps = step.end_ps;
    span.steps += 1;
    span.pages = step.pages;
    span.energy_pj += step.energy_pj;
  }

  RequestRow* requests_;
  int64_t count_;
  LimitRow limits_;
  StepTable times_ps_, energies_pj_;
  int64_t now_ps_ = 0, next_ = 0, free_pages_;
  bool has_finished_ = false, is_closed_ = true;
  size_t first_event_ = 0;
  std::vector<int64_t> generated_, last_token_ps_;
  std::deque<int64_t> waiting_;
  std::vector<Running> running_;  // in the order of admission; only the last can be in its prefill
  std::vector<SpanRow> spans_;
  std::vector<EventRow> events_;
  std::unordered_map<int64_t, int64_t> gaps_;
};

/*!
 * \brief Serve requests, which are sorted by arrival and fit the cache one by one.
 * \param requests `RequestRow`, one each; results are written there.
 * \param limits One `LimitRow`.
 * \param chunk_ps,chunk_pj int64 [context + 1]: a prefill's step by the position after its last token.
 * \param decode_ps,decode_pj int64 [max_batch + 1, context + 1]: a decode step by requests and mean context.
 * \return `SpanRow`, `EventRow` and `GapRow`, as bytes.
 */
ffi::Array<ffi::Bytes> Serve(ffi::TensorView requests, ffi::TensorView limits, ffi::TensorView chunk_ps,
                             ffi::TensorView chunk_pj, ffi::TensorView decode_ps, ffi::TensorView decode_pj) {
  const LimitRow& limit = ReadRecord<LimitRow>(limits);
  const int64_t chunks = limit.context + 1, decodes = (limit.max_batch + 1) * (limit.context + 1);
  auto table_data = [](const ffi::TensorView& tensor, int64_t size) {
    const DLDataType dtype = tensor.dtype();
    if (dtype.code != kDLInt || dtype.bits != 64 || !tensor.IsContiguous() || tensor.numel() != size) {
      TVM_FFI_THROW(ValueError) << tensor.numel() << " numbers are no table of " << size << " steps";
    }
    return static_cast<const int64_t*>(TensorData<int64_t>(tensor));
  };
  const StepTable times_ps{table_data(chunk_ps, chunks), table_data(decode_ps, decodes), limit.context};
  const StepTable energies_pj{table_data(chunk_pj, chunks), table_data(decode_pj, decodes), limit.context};
  if (limit.chunk_tokens < 1 || limit.page_tokens < 1 || limit.max_batch < 1) {
    TVM_FFI_THROW(ValueError) << "limits of a server are 1 or more";
  }
  const RecordTable<RequestRow> rows(requests);
  for (const RequestRow& row : rows) {
    const int64_t tokens = row.prompt_tokens + row.new_tokens - 1;
    const bool is_sorted = &row == rows.begin() || (&row - 1)->arrival_ps <= row.arrival_ps;
    if (!is_sorted || row.prompt_tokens < 1 || row.new_tokens < 1 || tokens > limit.context ||
        (tokens + limit.page_tokens - 1) / limit.page_tokens > limit.pages) {
      TVM_FFI_THROW(ValueError) << "request " << &row - rows.begin() << " cannot be served";
    }
  }
  return Server(rows, limit, times_ps, energies_pj).Run();
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  DefineRecord<RequestRow>("pimflow.simulators.served_request");
  DefineRecord<LimitRow>("pimflow.simulators.serving_limits");
  DefineRecord<SpanRow>("pimflow.simulators.serving_span");
  DefineRecord<EventRow>("pimflow.simulators.serving_event");
  DefineRecord<GapRow>("pimflow.simulators.token_gap");
  tvm::ffi::reflection::GlobalDef().def("pimflow.simulators.serve", Serve);
}

}  // namespace pimflow
