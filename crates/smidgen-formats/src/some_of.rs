//! Lists in messages: the first few names, and how many more there are.
//! A model has hundreds of tensors; a message that names all of them is unreadable.
//! Left out: quotes, which the caller puts around the names.

/// How many names a message lists before it only counts the rest.
const NAMED_AT_MOST: usize = 8;

/// The names separated by commas; of a long list the first names, then `and N more`.
pub(crate) fn some_of<T: AsRef<str>>(names: &[T]) -> String {
    let named: Vec<&str> = names.iter().take(NAMED_AT_MOST).map(AsRef::as_ref).collect();
    match names.len().saturating_sub(NAMED_AT_MOST) {
        0 => named.join(", "),
        more => format!("{} and {more} more", named.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::some_of;

    #[test]
    fn long_lists_are_cut_with_a_count() {
        let names: Vec<String> = (0..11).map(|i| i.to_string()).collect();
        assert_eq!(some_of(&names), "0, 1, 2, 3, 4, 5, 6, 7 and 3 more");
        assert_eq!(some_of(&names[..8]), "0, 1, 2, 3, 4, 5, 6, 7");
    }
}
