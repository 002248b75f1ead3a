//! Maps and sets over the values of a graph: one slot per value, no hashing.
//!
//! Passes look up values more than anything else, and ids are dense, so the id is the index. Iteration is in the order of
//! ids, whatever the order of insertion, so that the same input always gives the same plan.

use crate::graph::ValueId;
use std::ops::Index;

/// A map from values to `T`.
#[derive(Clone, Debug, PartialEq)]
pub struct ByValue<T> {
    slots: Vec<Option<T>>,
}

impl<T> Default for ByValue<T> {
    fn default() -> ByValue<T> {
        ByValue { slots: Vec::new() }
    }
}

impl<T> ByValue<T> {
    pub fn get(&self, id: &ValueId) -> Option<&T> {
        self.slots.get(id.index())?.as_ref()
    }

    pub fn get_mut(&mut self, id: &ValueId) -> Option<&mut T> {
        self.slots.get_mut(id.index())?.as_mut()
    }

    pub fn contains_key(&self, id: &ValueId) -> bool {
        self.get(id).is_some()
    }

    pub fn insert(&mut self, id: ValueId, item: T) -> Option<T> {
        self.slot(id).replace(item)
    }

    pub fn remove(&mut self, id: &ValueId) -> Option<T> {
        self.slots.get_mut(id.index())?.take()
    }

    /// The item of a value, inserted by `make` if there was none.
    pub fn get_or_insert_with(&mut self, id: ValueId, make: impl FnOnce() -> T) -> &mut T {
        self.slot(id).get_or_insert_with(make)
    }

    pub fn iter(&self) -> impl Iterator<Item = (ValueId, &T)> {
        let items = self.slots.iter().enumerate();
        items.filter_map(|(index, item)| Some((ValueId(index as u32), item.as_ref()?)))
    }

    fn slot(&mut self, id: ValueId) -> &mut Option<T> {
        if self.slots.len() <= id.index() {
            self.slots.resize_with(id.index() + 1, || None);
        }
        &mut self.slots[id.index()]
    }
}

impl<T> Index<&ValueId> for ByValue<T> {
    type Output = T;

    fn index(&self, id: &ValueId) -> &T {
        self.get(id).unwrap_or_else(|| panic!("nothing for value {}", id.0))
    }
}

impl<T> Extend<(ValueId, T)> for ByValue<T> {
    fn extend<I: IntoIterator<Item = (ValueId, T)>>(&mut self, items: I) {
        items.into_iter().for_each(|(id, item)| {
            self.insert(id, item);
        });
    }
}

impl<T> FromIterator<(ValueId, T)> for ByValue<T> {
    fn from_iter<I: IntoIterator<Item = (ValueId, T)>>(items: I) -> ByValue<T> {
        let mut all = ByValue::default();
        all.extend(items);
        all
    }
}

/// A set of values.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ValueSet {
    has: Vec<bool>,
}

impl ValueSet {
    pub fn contains(&self, id: &ValueId) -> bool {
        self.has.get(id.index()).copied().unwrap_or(false)
    }

    /// Returns whether the value is new in the set.
    pub fn insert(&mut self, id: ValueId) -> bool {
        if self.has.len() <= id.index() {
            self.has.resize(id.index() + 1, false);
        }
        !std::mem::replace(&mut self.has[id.index()], true)
    }

    pub fn remove(&mut self, id: &ValueId) {
        if let Some(has) = self.has.get_mut(id.index()) {
            *has = false;
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = ValueId> {
        let all = self.has.iter().enumerate();
        all.filter(|(_, has)| **has).map(|(index, _)| ValueId(index as u32))
    }
}

impl Extend<ValueId> for ValueSet {
    fn extend<I: IntoIterator<Item = ValueId>>(&mut self, ids: I) {
        ids.into_iter().for_each(|id| {
            self.insert(id);
        });
    }
}

impl<'a> Extend<&'a ValueId> for ValueSet {
    fn extend<I: IntoIterator<Item = &'a ValueId>>(&mut self, ids: I) {
        self.extend(ids.into_iter().copied());
    }
}

impl FromIterator<ValueId> for ValueSet {
    fn from_iter<I: IntoIterator<Item = ValueId>>(ids: I) -> ValueSet {
        let mut set = ValueSet::default();
        set.extend(ids);
        set
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_iterates_in_the_order_of_ids() {
        let mut table: ByValue<char> = [(ValueId(5), 'e'), (ValueId(2), 'b')].into_iter().collect();
        assert_eq!(table.insert(ValueId(2), 'c'), Some('b'));
        assert_eq!(table.get(&ValueId(9)), None);
        assert_eq!(table.iter().collect::<Vec<_>>(), [(ValueId(2), &'c'), (ValueId(5), &'e')]);
        assert_eq!(*table.get_or_insert_with(ValueId(5), || 'x'), 'e');
        assert_eq!((table.remove(&ValueId(5)), table.contains_key(&ValueId(5))), (Some('e'), false));
        assert_eq!(table[&ValueId(2)], 'c');
    }

    #[test]
    fn a_set_iterates_in_the_order_of_ids() {
        let mut set: ValueSet = [7, 0, 3].map(ValueId).into_iter().collect();
        assert!(!set.insert(ValueId(3)) && set.insert(ValueId(4)));
        set.remove(&ValueId(7));
        set.remove(&ValueId(70));
        assert_eq!(set.iter().collect::<Vec<_>>(), [0, 3, 4].map(ValueId));
        assert!(set.contains(&ValueId(4)) && !set.contains(&ValueId(7)) && !set.contains(&ValueId(99)));
    }
}
