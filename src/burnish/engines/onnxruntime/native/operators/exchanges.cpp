#include "exchange_operator.h"
