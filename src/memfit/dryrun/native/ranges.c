// Ranges as a treap (a search tree by address that random priorities keep balanced). Every node knows the free
// bytes right before it and the widest such gap below it, so finding, placing and removing take O(log n):
// a long run holds tens of thousands of segments.
#include "ranges.h"

#include <stdlib.h>

static size_t widest(const Range *r) { return r ? r->widest_gap : 0; }

static Range *updated(Range *r) {
  size_t below = widest(r->left) > widest(r->right) ? widest(r->left) : widest(r->right);
  r->widest_gap = r->gap > below ? r->gap : below;
  return r;
}

static Range *merge(Range *low, Range *high) {
  if (!low) return high;
  if (!high) return low;
  if (low->priority > high->priority) {
    low->right = merge(low->right, high);
    return updated(low);
  }
  high->left = merge(low, high->left);
  return updated(high);
}

// Everything below the address goes to *low, the rest to *high.
static void split(Range *r, uintptr_t address, Range **low, Range **high) {
  if (!r) {
    *low = *high = NULL;
  } else if (r->at < address) {
    split(r->right, address, &r->right, high);
    *low = updated(r);
  } else {
    split(r->left, address, low, &r->left);
    *high = updated(r);
  }
}

static Range *last(Range *r) {
  while (r && r->right) r = r->right;
  return r;
}

static Range *first(Range *r) {
  while (r && r->left) r = r->left;
  return r;
}

// Sets the gap of the leftmost range, and what its ancestors know of it.
static void set_first_gap(Range *r, size_t gap) {
  if (r->left) set_first_gap(r->left, gap);
  else r->gap = gap;
  updated(r);
}

static unsigned next_priority(void) {  // xorshift: the balance must not depend on the program's own rand()
  static unsigned state = 2463534242u;
  state ^= state << 13;
  state ^= state >> 17;
  state ^= state << 5;
  return state;
}

static uintptr_t end_of(const Range *r, uintptr_t otherwise) { return r ? r->at + r->length : otherwise; }

Range *ranges_insert(Ranges *set, uintptr_t at, size_t length) {
  Range *low, *high, *made = NULL;
  split(set->root, at, &low, &high);
  Range *after = first(high);
  uintptr_t free_from = end_of(last(low), set->base);
  if (free_from <= at && (!after || at + length <= after->at)) made = calloc(1, sizeof *made);
  if (made) {
    made->at = at;
    made->length = length;
    made->ordinal = set->taken++;
    made->priority = next_priority();
    made->gap = at - free_from;
    updated(made);
    if (after) set_first_gap(high, after->at - (at + length));
    if (at + length > set->high) set->high = at + length;
  }
  set->root = merge(merge(low, made), high);
  return made;
}

void ranges_remove(Ranges *set, Range *range) {
  Range *low, *rest, *self, *high;
  split(set->root, range->at, &low, &rest);
  split(rest, range->at + 1, &self, &high);
  Range *after = first(high);
  if (after) set_first_gap(high, after->gap + range->length + range->gap);
  set->root = merge(low, high);
  free(self);
}

Range *ranges_find(const Ranges *set, uintptr_t address) {
  Range *r = set->root;
  while (r && !(address >= r->at && address - r->at < r->length)) r = address < r->at ? r->left : r->right;
  return r;
}

Range *ranges_from(const Ranges *set, uintptr_t address) {
  Range *best = NULL;
  for (Range *r = set->root; r;) {
    if (r->at >= address) {
      best = r;
      r = r->left;
    } else {
      r = r->right;
    }
  }
  return best;
}

uintptr_t ranges_lowest_gap(const Ranges *set, size_t length) {
  Range *r = set->root;
  if (widest(r) < length) {
    uintptr_t at = end_of(last(r), set->base);
    return set->end - at >= length ? at : 0;
  }
  for (;;) {
    if (widest(r->left) >= length) r = r->left;
    else if (r->gap >= length) return r->at - r->gap;
    else r = r->right;
  }
}

uintptr_t ranges_above_all(const Ranges *set, size_t length) {
  uintptr_t at = set->high > set->base ? set->high : set->base;
  return set->end - at >= length ? at : 0;
}
