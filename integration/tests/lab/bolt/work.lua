local function fib(n) if n < 2 then return n end return fib(n-1) + fib(n-2) end
local seed = 42
local function rand(n) seed = (seed * 1103515245 + 12345) & 0x7fffffff; return (seed >> 16) % n end
local function quicksort(t, first, last)
  while first < last do
    local pivot, i, j = t[(first + last) // 2], first, last
    while i <= j do
      while t[i] < pivot do i = i + 1 end
      while t[j] > pivot do j = j - 1 end
      if i <= j then t[i], t[j] = t[j], t[i]; i = i + 1; j = j - 1 end
    end
    quicksort(t, first, j)
    first = i
  end
end
local function sieve(n)
  local composite, primes = {}, 0
  for i = 2, n do
    if not composite[i] then
      primes = primes + 1
      for j = i * i, n, i do composite[j] = true end
    end
  end
  return primes
end
local t, counts = {}, {}
local function round()
  for i = 1, 1000 do t[i] = rand(5000) end
  quicksort(t, 1, #t)
  for i = 1, #t do
    local class = t[i] % 3 == 0 and "three" or t[i] % 2 == 0 and "even" or "odd"
    counts[class] = (counts[class] or 0) + 1
  end
  return t[1], t[#t], sieve(3000), fib(15)
end
for i = 1, tonumber(arg[1]) do
  local a, b, c, d = round()
  if i == 1 then print(a, b, c, d, counts.three, counts.even, counts.odd) end
end
