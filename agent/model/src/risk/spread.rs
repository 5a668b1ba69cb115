//! Owns sums of uncertain growth: distributions over the room that is left, in equal cells.
//! Refuses sampling: two spreads are added exactly, cell by cell.

/// Cells between nothing and all of the room. What does not fit is in one number.
pub(super) const CELLS: usize = 64;

/// How growth may turn out, in cells of the room that is left.
#[derive(Clone, Debug)]
pub(super) struct Spread {
    /// Bytes a cell.
    cell: f64,
    mass: [f64; CELLS],
    /// Cells beyond this are empty.
    top: usize,
    /// The probability of growing by all of the room or more.
    pub(super) beyond: f64,
}

impl Spread {
    /// No growth for certain.
    pub(super) fn still(room: f64) -> Self {
        let mut mass = [0.0; CELLS];
        mass[0] = 1.0;
        Self { cell: (room / CELLS as f64).max(1.0), mass, top: 1, beyond: 0.0 }
    }

    /// Growth that exceeds `x` bytes with probability `exceeds(x)`, and `most` at the most.
    pub(super) fn by(room: f64, most: f64, exceeds: impl Fn(f64) -> f64) -> Self {
        let mut spread = Self::still(room);
        let survival = |x: f64| if x > most { 0.0 } else { exceeds(x) };
        let mut above = 1.0;
        for (index, mass) in spread.mass.iter_mut().enumerate() {
            let next = survival((index as f64 + 0.5) * spread.cell).min(above);
            *mass = above - next;
            above = next;
            spread.top = index + 1;
            if above <= 0.0 {
                return spread;
            }
        }
        // The last half cell belongs to the wall itself.
        spread.beyond = survival(room).min(above);
        spread.mass[CELLS - 1] += above - spread.beyond;
        spread
    }

    pub(super) fn plus(&self, other: &Self) -> Self {
        let top = (self.top + other.top - 1).min(CELLS);
        let mut sum = Self { cell: self.cell, mass: [0.0; CELLS], top, beyond: 0.0 };
        let theirs = &other.mass[..other.top];
        for (left, a) in self.mass[..self.top].iter().enumerate().filter(|(_, a)| **a > 1e-9) {
            for (b, into) in theirs.iter().zip(&mut sum.mass[left..]) {
                *into += a * b;
            }
        }
        sum.beyond = (1.0 - sum.mass.iter().sum::<f64>()).clamp(0.0, 1.0);
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_halves_fill_the_room_as_often_as_chance_has_it() {
        // Each grows by 60 % of the room with probability 1/2, else not at all.
        let coin = || Spread::by(100.0, 60.0, |_| 0.5);
        let both = coin().plus(&coin());
        assert!((both.beyond - 0.25).abs() < 1e-9, "{}", both.beyond);
    }

    #[test]
    fn growth_beyond_the_room_is_kept_as_such() {
        let line = Spread::by(100.0, 200.0, |x| 1.0 - x / 200.0);
        assert!((line.beyond - 0.5).abs() < 1e-9);
        assert!((Spread::still(100.0).plus(&line).beyond - 0.5).abs() < 1e-9);
    }
}
