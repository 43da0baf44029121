#include "convolution_operators.h"
