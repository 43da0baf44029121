#include "indexing_operators.h"
#include "row_operators.h"
