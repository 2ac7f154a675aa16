#pragma once

#include "../csrc/ops.h"
