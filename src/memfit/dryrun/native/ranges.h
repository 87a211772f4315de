// An ordered set of address ranges that do not overlap, with the lowest gap of a given size at hand.
#pragma once
#include <stddef.h>
#include <stdint.h>

typedef struct Range {
  uintptr_t at;
  size_t length;
  size_t charged_bytes;   // physical memory that goes when the range goes
  unsigned long ordinal;  // how many ranges were taken before this one
  void *owner;
  int device;
  size_t gap, widest_gap;  // free bytes right before it; the widest gap of its subtree
  unsigned priority;
  struct Range *left, *right;
} Range;

typedef struct {
  uintptr_t base, end;  // addresses [base, end)
  uintptr_t high;       // end of the highest range ever held
  unsigned long taken;
  Range *root;
} Ranges;

Range *ranges_insert(Ranges *set, uintptr_t at, size_t length);  // NULL: no memory, or it overlaps another
void ranges_remove(Ranges *set, Range *range);                   // the range is freed
Range *ranges_find(const Ranges *set, uintptr_t address);        // the range that holds the address
Range *ranges_from(const Ranges *set, uintptr_t address);        // the first range at or above the address
uintptr_t ranges_lowest_gap(const Ranges *set, size_t length);   // 0: none
uintptr_t ranges_above_all(const Ranges *set, size_t length);    // 0: none; never hands out an address twice
