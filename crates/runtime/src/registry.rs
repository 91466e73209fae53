//! Groups by name, for code that has the name of a group as text: a compiled graph, a configuration, another language.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::Group;

static GROUPS: Mutex<BTreeMap<String, Group>> = Mutex::new(BTreeMap::new());

fn groups() -> MutexGuard<'static, BTreeMap<String, Group>> {
    GROUPS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes `group` known as `name` in this process, and keeps it until it is unregistered. The group that had the name before
/// is returned.
///
/// ```
/// use tenfold::{Group, registry};
/// Group::threads(1, |group| {
///     registry::register("tp", &group);
///     assert_eq!(registry::find("tp").map(|group| group.size()), Some(1));
///     assert_eq!(registry::names(), ["tp"]);
///     registry::unregister("tp");
///     assert!(registry::find("tp").is_none());
///     Ok(())
/// })?;
/// # Ok::<(), tenfold::Error>(())
/// ```
pub fn register(name: impl Into<String>, group: &Group) -> Option<Group> {
    groups().insert(name.into(), group.clone())
}

/// The group that is known as `name`.
pub fn find(name: &str) -> Option<Group> {
    groups().get(name).cloned()
}

/// Forgets `name`, and returns the group that had it.
pub fn unregister(name: &str) -> Option<Group> {
    groups().remove(name)
}

/// Forgets all names.
pub fn unregister_all() {
    // Dropped after the lock is free: leaving a group may take a moment.
    let groups = std::mem::take(&mut *groups());
    drop(groups);
}

/// Every name, in order.
pub fn names() -> Vec<String> {
    groups().keys().cloned().collect()
}
