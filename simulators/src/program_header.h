/*!
 * \file program_header.h
 * \brief Sizes of a program that decide what its commands do with banks, buffers and latches.
 */
#ifndef PIMFLOW_SIMULATORS_PROGRAM_HEADER_H_
#define PIMFLOW_SIMULATORS_PROGRAM_HEADER_H_

#include "../../python/pimflow/host/src/records.h"

namespace pimflow {

/*! \brief The header of a program; runtime modules store it. */
PIMFLOW_RECORD(ProgramHeader, int64_t, n, h, w, c, oc, kh, kw, stride_h, stride_w, dilation_h, dilation_w, pad_top,
               pad_left, oh, ow, pixel_begin, pixel_end, banks, gangs, columns, elements_per_column, buffers, row_begin,
               rows,
               storage,  // a Storage
               buffer_columns,
               tile_banks,  // banks that compute; READRESs deliver no results of the others
               latches,     // latch l takes vectors of buffer l modulo `buffers`
               // Parts of the channels of a grouped convolution; `c` and `oc` are the channels of one part. Pixel p
               // uses part p / (n * oh * ow).
               parts,
               table_row);  // row of the table of the activation function, which identifies it; -1 for none

}  // namespace pimflow

#endif  // PIMFLOW_SIMULATORS_PROGRAM_HEADER_H_
