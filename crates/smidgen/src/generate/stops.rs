//! Texts that end an answer: text that may be the beginning of one is held back until the next piece decides.
//!
//! The text of a stop is not part of the answer, as in OpenAI's interface.

#[derive(Clone, Debug, Default)]
pub struct Stops {
    stops: Vec<String>,
    held: String,
    is_reached: bool,
}

impl Stops {
    /// Empty texts are left out.
    pub fn of(mut stops: Vec<String>) -> Stops {
        stops.retain(|stop| !stop.is_empty());
        Stops { stops, ..Stops::default() }
    }

    pub fn is_reached(&self) -> bool {
        self.is_reached
    }

    /// Adds a piece; returns the text that no stop can contain any more.
    pub fn push(&mut self, piece: &str) -> String {
        if self.is_reached {
            return String::new();
        }
        self.held += piece;
        let first = self.stops.iter().filter_map(|stop| self.held.find(stop)).min();
        if let Some(place) = first {
            self.is_reached = true;
            self.held.truncate(place);
            return std::mem::take(&mut self.held);
        }
        let is_begun = |place: &usize| self.stops.iter().any(|stop| stop.starts_with(&self.held[*place..]));
        let place = self.held.char_indices().map(|(place, _)| place).find(is_begun);
        let rest = self.held.split_off(place.unwrap_or(self.held.len()));
        std::mem::replace(&mut self.held, rest)
    }

    /// The text that is still held back at the end of the answer.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(stops: &[&str], pieces: &[&str]) -> (Vec<String>, bool) {
        let mut it = Stops::of(stops.iter().map(ToString::to_string).collect());
        let mut said: Vec<String> = pieces.iter().map(|piece| it.push(piece)).collect();
        said.push(it.finish());
        (said, it.is_reached())
    }

    #[test]
    fn a_stop_may_come_in_pieces() {
        assert_eq!(
            all(&["END"], &["one E", "N", "D two"]),
            (vec!["one ".into(), "".into(), "".into(), "".into()], true)
        );
        assert_eq!(all(&["END"], &["one E", "Nd"]), (vec!["one ".into(), "ENd".into(), "".into()], false));
        assert_eq!(all(&["END"], &["one E"]), (vec!["one ".into(), "E".into()], false));
        assert_eq!(all(&["b", "ab"], &["xaby"]), (vec!["x".into(), "".into()], true));
        assert_eq!(all(&["é!"], &["né", "!"]), (vec!["n".into(), "".into(), "".into()], true));
        assert_eq!(all(&[""], &["one"]), (vec!["one".into(), "".into()], false));
    }
}
