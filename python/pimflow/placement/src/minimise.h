/*!
 * \file minimise.h
 * \brief The best plan, by searches of which each knows more than the one before.
 */
#ifndef PIMFLOW_PLACEMENT_MINIMISE_H_
#define PIMFLOW_PLACEMENT_MINIMISE_H_

#include "label_search.h"

namespace pimflow {
namespace placement {

/*! \brief The best plan alone, and what no plan is below. */
Result Minimise(LabelSearch& search, const Question& question);

}  // namespace placement
}  // namespace pimflow
#endif  // PIMFLOW_PLACEMENT_MINIMISE_H_
