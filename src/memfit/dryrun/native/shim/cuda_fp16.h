// Stands in for CUDA's own header, which needs parts that only a toolkit has.
#pragma once
typedef struct {
  unsigned short x;
} __half;
typedef struct {
  unsigned x;
} __half2;
