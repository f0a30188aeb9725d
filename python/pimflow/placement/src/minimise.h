/*!
 * \file minimise.h
 * \brief The best plan, by a sequence of searches with tighter and tighter bounds.
 */
#ifndef PIMFLOW_PLACEMENT_MINIMISE_H_
#define PIMFLOW_PLACEMENT_MINIMISE_H_

#include "label_search.h"

namespace pimflow {
namespace placement {

/*! \brief The best plan, and a lower bound of the value of all plans. */
Result Minimise(LabelSearch& search, const Query& query);

}  // namespace placement
}  // namespace pimflow
#endif  // PIMFLOW_PLACEMENT_MINIMISE_H_
