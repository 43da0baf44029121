#include "recurrent_operators.h"
