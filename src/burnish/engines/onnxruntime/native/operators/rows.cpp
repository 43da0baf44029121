#include "row_operators.h"
