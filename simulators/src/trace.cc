/*!
 * \brief Reads and writes the `.pim` traces of the PIMFlow authors' Ramulator fork.
 *
 * A line is `READRES` with anything after it, or `<hex address> <command>` with one or more blanks
 * between: anything that contains GWRITE, or exactly G_ACT0..G_ACT3 or COMP. Every line ends in a
 * newline; there are no blank lines and no comments.
 */
#include <tvm/ffi/tvm_ffi.h>

#include <algorithm>
#include <string>
#include <string_view>

#include "timing.h"

namespace pimflow {
namespace {

namespace ffi = tvm::ffi;

constexpr int kTraceGangs = 1 << (kAddressBits - kGangShift);

int HexDigit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  c |= 0x20;
  return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/*! \brief Parse one line into `word`; returns the problem, or null. */
const char* ParseLine(std::string_view line, uint32_t* word) {
  if (line.substr(0, 7) == "READRES") {
    *word = kTraceReadres << kAddressBits;
    return nullptr;
  }
  if (line.empty()) return "blank line";
  size_t i = 0;
  if (line.size() > 2 && line[0] == '0' && (line[1] | 0x20) == 'x') i = 2;
  const size_t digits = i;
  uint64_t address = 0;
  bool too_wide = false;
  for (int digit; i < line.size() && (digit = HexDigit(line[i])) >= 0; ++i) {
    address = address << 4 | static_cast<uint64_t>(digit);
    too_wide |= address >> kAddressBits != 0;
    address &= (uint64_t{1} << kAddressBits) - 1;
  }
  const bool address_ends = i < line.size() && line[i] == ' ';
  if (i == digits || !address_ends) {
    if (line[0] == '#' || line.substr(0, 2) == "//") return "comments are not allowed";
    const size_t blank = line.find(' ');
    if (blank == 0 || blank == std::string_view::npos) return "missing address or command";
    return "address is not hexadecimal";
  }
  if (too_wide) return "address is beyond 29 bits";
  while (i < line.size() && line[i] == ' ') ++i;
  const std::string_view command = line.substr(i);
  // The fork compares COMP and G_ACT exactly, and accepts GWRITE anywhere in the command.
  const bool crlf = !command.empty() && command.back() == '\r';
  uint32_t kind;
  if (command == "COMP") {
    kind = kTraceComp;
  } else if (command.size() == 6 && command.substr(0, 5) == "G_ACT" && command[5] >= '0' &&
             command[5] < '0' + kTraceGangs) {
    kind = kTraceGAct0 + static_cast<uint32_t>(command[5] - '0');
  } else if (command.find("GWRITE") != std::string_view::npos) {
    kind = kTraceGwrite;
  } else {
    return crlf ? "the line ends in CRLF, not LF" : command.empty() ? "missing command" : "unknown command";
  }
  *word = kind << kAddressBits | static_cast<uint32_t>(address);
  return nullptr;
}

/*!
 * \brief Parse a trace into one uint32 word a line.
 * \param words As many elements as `text` has newlines.
 * \return Empty, or "<line>:<problem>" for the first malformed line.
 */
ffi::String ParseTrace(ffi::Bytes text, ffi::TensorView words) {
  std::string_view remaining(text.data(), text.size());
  uint32_t* word = Data<uint32_t>(words, std::count(remaining.begin(), remaining.end(), '\n'));
  for (int64_t line = 1; !remaining.empty(); ++line) {
    const size_t end = remaining.find('\n');
    const char* problem = end == std::string_view::npos ? "the last line does not end in a newline"
                                                        : ParseLine(remaining.substr(0, end), word++);
    if (problem != nullptr) return ffi::String(std::to_string(line) + ":" + problem);
    remaining.remove_prefix(end + 1);
  }
  return ffi::String("");
}

/*! \brief Visitor that writes commands as lines, without buffers and gathers. */
class TraceWriter {
 public:
  void Gwrite(int64_t, int64_t, int64_t, int64_t, int64_t) { Line(0, "GWRITE"); }

  void GAct(int64_t gang, int64_t row) {
    static constexpr const char* kNames[kTraceGangs] = {"G_ACT0", "G_ACT1", "G_ACT2", "G_ACT3"};
    Check("gang", gang, kTraceGangs);
    Line(gang << kGangShift | RowAddress(row), kNames[gang]);
  }

  void Comp(int64_t, int64_t row, int64_t column, int64_t count) {
    for (const int64_t end = column + count; column < end; ++column) {
      Check("column", column, int64_t{1} << kColumnBits);
      Line(RowAddress(row) | column << kOffsetBits, "COMP");
    }
  }

  void Readres(int64_t, int64_t, int64_t) { Append("READRES\n"); }
  void Wrbias(int64_t, int64_t, int64_t, bool) { TVM_FFI_THROW(ValueError) << "a .pim trace has no WRBIAS"; }

  void Af(int64_t, int64_t) { TVM_FFI_THROW(ValueError) << "a .pim trace has no AF"; }

  void Write(const WriteOperands&) { TVM_FFI_THROW(ValueError) << "WRITE has no place in a .pim trace"; }

  ffi::Bytes Finish() { return ffi::Bytes(std::move(text_)); }

 private:
  static void Check(const char* operand, int64_t index, int64_t size) {
    if (index < 0 || index >= size) {
      TVM_FFI_THROW(ValueError) << operand << " " << index << " has no place in a .pim address (" << size << ")";
    }
  }

  static int64_t RowAddress(int64_t row) {
    Check("row", row, int64_t{1} << kRowBits);
    return row << kRowShift;
  }

  void Append(std::string_view text) {
    if (text_.size() >= kMaxTextBytes) TVM_FFI_THROW(ValueError) << "its .pim trace has more than 256 MiB";
    if ((++lines_ & 0xffff) == 0) CheckInterrupt();
    text_.append(text);
  }

  void Line(int64_t address, const char* command) {
    static constexpr char kHex[] = "0123456789abcdef";
    char line[] = "0x00000000 ";
    for (int i = 9; i >= 2; --i, address >>= 4) line[i] = kHex[address & 15];
    Append({line, sizeof(line) - 1});
    text_.append(command).push_back('\n');
  }

  static constexpr size_t kMaxTextBytes = size_t{1} << 28;
  std::string text_;
  uint64_t lines_ = 0;
};

/*! \brief The `.pim` text of an encoded program. */
ffi::Bytes WriteTrace(ffi::TensorView stream) {
  TraceWriter writer;
  Walk(Stream(stream), stream.numel(), &writer);
  return writer.Finish();
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = tvm::ffi::reflection;
  refl::GlobalDef()
      .def("pimflow.simulators.parse_trace", ParseTrace)
      .def("pimflow.simulators.write_trace", WriteTrace);
}

}  // namespace pimflow
