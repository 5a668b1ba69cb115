// Owns how a type reads in JSON: enums become their values, to any depth. What is left out stays left out.
export type Loose<T> = unknown extends T
  ? T
  : T extends string
    ? `${T}`
    : T extends number
      ? number
      : T extends boolean | null | undefined
        ? T
        : T extends Array<infer Item>
          ? Array<Loose<Item>>
          : { [Key in keyof T]: Loose<T[Key]> };
