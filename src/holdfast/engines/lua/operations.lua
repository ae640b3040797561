-- What conditions and operations do to a batch's overlay, for commit.lua, which follows it.
--
-- Functions and state are fields of F, G and B, not locals: a script runs from its top each time, and making a closure
-- costs by the number of locals it captures. What few groups need is made when it is needed.

local F = {} -- functions
local G = {} -- the group: what its batches have done so far
local B = {} -- one batch under evaluation; nothing of it counts until `F.accept`

-- --- entries ---

function F.entry_before(key)
  local raw = redis.call('HGET', KEYS[1], key)
  local entry = raw and parse(raw)
  G.stored[key] = entry
  return entry
end

function F.live(key)
  local entry = B.writes[key]
  if entry ~= nil then
    return entry
  end
  entry = G.writes[key]
  if entry == nil then
    entry = G.stored[key]
    if entry == nil then
      entry = F.entry_before(key)
    end
  end
  if entry and entry.expires and entry.expires <= G.now then
    if not B.expired[key] then
      B.expired[key] = entry
      B.expired[#B.expired + 1] = key
    end
    return false
  end
  return entry
end

function F.value_of(entry)
  if not entry.value then
    entry.value = string.sub(entry.raw, entry.start)
  end
  return entry.value
end

function F.raw_of(entry)
  if not entry.raw then
    entry.raw = entry.version .. '\n' .. entry.created .. '\n' .. entry.updated .. '\n'
      .. (entry.expires and text(entry.expires) or '') .. '\n' .. entry.owner .. '\n' .. entry.tag .. '\n' .. entry.value
    entry.start = #entry.raw - entry.size + 1
  end
  return entry.raw
end

-- --- msgpack, where Redis's own library has no word for it, or takes longer ---

function F.bytes(value)
  local size = #value
  if size < 256 then
    return '\196' .. string.char(size) .. value
  elseif size < 65536 then
    return '\197' .. struct.pack('>I2', size) .. value
  end
  return '\198' .. struct.pack('>I4', size) .. value
end

function F.array(count)
  if count < 16 then
    return string.char(144 + count)
  elseif count < 65536 then
    return '\220' .. struct.pack('>I2', count)
  end
  return '\221' .. struct.pack('>I4', count)
end

-- A change: nine fields, of which `head` has the array's beginning and the operation.
function F.change(head, key, exists, value, size, owner, tag, was, expires)
  local told = B.changes
  told[#told + 1] = head .. cmsgpack.pack(key, exists) .. F.bytes(value) .. cmsgpack.pack(size, owner, tag, was)
    .. (expires and cmsgpack.pack(expires) or '\192')
end

-- --- what operations do ---

function F.write(key, entry)
  if B.writes[key] == nil then
    B.order[#B.order + 1] = key
  end
  B.writes[key] = entry
end

function F.put(head, key, value, old, owner, expires, tag)
  local size = #value
  local new = { version = B.version_text, created = old and old.created or G.now_text, updated = G.now_text,
    expires = expires, owner = owner, tag = tag, value = value, size = size }
  F.write(key, new)
  if not old or old.owner ~= owner or old.size ~= size then
    B.replaced[#B.replaced + 1] = { key, old, new }
  end
  -- FEED_VALUE_BYTES_MAX
  F.change(head, key, true, size <= 65536 and value or '', size, owner, tag, old and old.tag or '', expires)
  return new
end

function F.remove(head, key, old)
  F.write(key, false)
  B.replaced[#B.replaced + 1] = { key, old, false }
  F.change(head, key, false, '', 0, old.owner, '', old.tag, nil)
end

-- A ttl in an argument: '' is none.
function F.expiry(ttl)
  if ttl ~= '' then
    return G.now + tonumber(ttl)
  end
  return nil
end

-- The next id: the millisecond and a counter of 20 bits, one number of 19 digits, beyond what a double holds.
function F.assign_id()
  B.id_counter = B.id_counter + 1
  if B.id_counter == 1048576 then
    B.id_ms, B.id_counter = B.id_ms + 1, 0
  end
  if G.now > B.id_ms then
    B.id_ms, B.id_counter = G.now, 0
  end
  local low = (B.id_ms % 1e6) * 1048576 + B.id_counter
  local high = math.floor(B.id_ms / 1e6) * 1048576 + math.floor(low / 1e6)
  return string.format('%013.0f%06.0f', high, low % 1e6)
end

function F.touch(key, ttl)
  local entry = F.live(key)
  if not entry then
    return nil, '\146' .. cmsgpack.pack(4, key)
  end
  if not entry.expires then
    return '\192'
  end
  local expires = math.max(entry.expires, G.now + tonumber(ttl))
  if expires ~= entry.expires then
    F.write(key, { version = entry.version, created = entry.created, updated = entry.updated, expires = expires,
      owner = entry.owner, tag = entry.tag, value = F.value_of(entry), size = entry.size })
  end
  return cmsgpack.pack(expires)
end

-- Numbers: whole ones of 64 bits are two doubles of the same sign, billions and the rest.
function F.need_numbers()
  function F.split(digits)
    local sign, number = string.match(digits, '^(%-?)(%d+)$')
    sign = sign == '-' and -1 or 1
    return sign * tonumber('0' .. string.sub(number, 1, -10)), sign * tonumber(string.sub(number, -9))
  end

  function F.fits(high, low)
    if high >= 0 and low >= 0 then
      return high < 9223372036 or (high == 9223372036 and low <= 854775807)
    end
    return high > -9223372036 or (high == -9223372036 and low >= -854775808)
  end

  function F.add(high, low, more_high, more_low)
    high, low = high + more_high, low + more_low
    if low >= 1e9 then
      high, low = high + 1, low - 1e9
    elseif low <= -1e9 then
      high, low = high - 1, low + 1e9
    end
    if high > 0 and low < 0 then
      high, low = high - 1, low + 1e9
    elseif high < 0 and low > 0 then
      high, low = high + 1, low - 1e9
    end
    return high, low
  end

  function F.digits_of(high, low)
    local sign = (high < 0 or low < 0) and '-' or ''
    if high == 0 then
      return sign .. text(math.abs(low))
    end
    return sign .. text(math.abs(high)) .. string.format('%09.0f', math.abs(low))
  end

  -- The number an entry holds, in its two parts; nil when it is none. What is absent counts as 0.
  function F.number_of(entry)
    if not entry then
      return 0, 0
    end
    if entry.size > 20 then
      return nil
    end
    local value = F.value_of(entry)
    local digits = string.match(value, '^%-?([1-9]%d*)$')
    if value ~= '0' and (not digits or #digits > 19) then
      return nil
    end
    local high, low = F.split(value)
    if F.fits(high, low) then
      return high, low
    end
    return nil
  end

  function F.no_number(key, entry)
    return '\148' .. cmsgpack.pack(2, key) .. F.bytes(string.sub(F.value_of(entry), 1, 1)) .. cmsgpack.pack(entry.tag)
  end

  function F.increment(key, delta_high, delta_low, ttl)
    local old = F.live(key)
    local high, low = F.number_of(old)
    if not high then
      return nil, F.no_number(key, old)
    end
    high, low = F.add(high, low, delta_high, delta_low)
    local sum = F.digits_of(high, low)
    if not F.fits(high, low) then
      return nil, '\147' .. cmsgpack.pack(3, key, sum)
    end
    if old then
      F.put('\153\169increment', key, sum, old, old.owner, ttl == '' and old.expires or F.expiry(ttl), old.tag)
    else
      F.put('\153\169increment', key, sum, nil, B.actor, F.expiry(ttl), '')
    end
    return cmsgpack.pack(sum)
  end
end

function F.need_ranges()
  -- The order of bytes, whatever the server's locale.
  function F.before(a, b)
    for i = 1, math.min(#a, #b) do
      local left, right = string.byte(a, i), string.byte(b, i)
      if left ~= right then
        return left < right
      end
    end
    return #a < #b
  end

  -- The keys of the first n live entries under a prefix, the overlay's over the stored ones.
  function F.first_live(prefix, n, upto)
    local overlay, count, found = {}, 0, {}
    for _, written in ipairs({ G.writes, B.writes }) do
      for key, entry in pairs(written) do
        if string.sub(key, 1, #prefix) == prefix then
          if overlay[key] == nil then
            count = count + 1
          end
          overlay[key] = entry
        end
      end
    end
    for key, entry in pairs(overlay) do
      if entry and (upto == '' or F.before(key, upto)) and F.live(key) then
        found[#found + 1] = key
      end
    end
    local low, high = '[' .. prefix, '(' .. string.sub(prefix, 1, -2) .. '0' -- what follows the slash it ends in
    if upto ~= '' and F.before(upto, string.sub(high, 2)) then
      high = '(' .. upto
    end
    local seen, wanted = 0, n + count
    while seen < n do
      local page = redis.call('ZRANGEBYLEX', KEYS[2], low, high, 'LIMIT', 0, wanted)
      if #page == 0 then
        break
      end
      local raws = fetch(KEYS[1], page)
      for i, key in ipairs(page) do
        if G.stored[key] == nil then
          G.stored[key] = raws[i] and parse(raws[i])
        end
        if overlay[key] == nil and F.live(key) then
          found[#found + 1] = key
          seen = seen + 1
        end
      end
      low = '(' .. page[#page]
    end
    table.sort(found, F.before)
    return found
  end

end

function F.need_take()
  if not F.increment then
    F.need_numbers()
  end
  if not F.first_live then
    F.need_ranges()
  end

  function F.take(source, target, n, upto, source_counter, target_counter)
    local found = F.first_live(source, n, upto)
    local moved = {}
    for i = 1, math.min(n, #found) do
      local from = found[i]
      local old, key = F.live(from), target .. string.sub(from, #source + 1)
      if #key > 1024 then -- KEY_BYTES_MAX
        return nil, '\147' .. cmsgpack.pack(5, from, target)
      end
      F.remove('\153\164take', from, old)
      local there = F.live(key)
      local new = F.put('\153\164take', key, F.value_of(old), there, B.actor, old.expires, old.tag)
      new.created = old.created
      moved[i] = { key, new }
    end
    local counters = { { source_counter, -#moved }, { target_counter, #moved } }
    for _, counter in ipairs(#moved > 0 and counters or {}) do
      if counter[1] ~= '' then
        local _, refused = F.increment(counter[1], 0, counter[2], '')
        if refused then
          return nil, refused
        end
      end
    end
    local answer = { F.array(#moved) }
    for i, pair in ipairs(moved) do
      answer[i + 1] = '\146' .. cmsgpack.pack(pair[1]) .. F.bytes(F.raw_of(pair[2]))
    end
    return table.concat(answer)
  end
end

-- Perform the operation that begins at ARGV[i]: its result and where the next one begins, or nil and the refusal.
function F.perform(i)
  local kind, key = ARGV[i], ARGV[i + 1]
  if kind == 'P' then -- put, with nothing but a value
    F.put('\153\163put', key, ARGV[i + 2], F.live(key), B.actor, nil, '')
    return '\192', i + 3
  elseif kind == 'p' then
    local owner = ARGV[i + 5] ~= '' and ARGV[i + 5] or B.actor
    F.put('\153\163put', key, ARGV[i + 2], F.live(key), owner, F.expiry(ARGV[i + 3]), ARGV[i + 4])
    return '\192', i + 6
  elseif kind == 'i' then
    if not F.increment then
      F.need_numbers()
    end
    local high, low = F.split(ARGV[i + 2])
    local sum, refused = F.increment(key, high, low, ARGV[i + 3])
    return sum, refused or i + 4
  elseif kind == 'd' then
    local entry = F.live(key)
    if not entry then
      return '\194', i + 2
    end
    F.remove('\153\166delete', key, entry)
    return '\195', i + 2
  elseif kind == 'q' then
    local pushed = key .. F.assign_id()
    F.put('\153\164push', pushed, ARGV[i + 2], nil, B.actor, F.expiry(ARGV[i + 3]), ARGV[i + 4])
    return cmsgpack.pack(pushed), i + 5
  elseif kind == 't' then
    local expires, refused = F.touch(key, ARGV[i + 2])
    return expires, refused or i + 3
  end
  if not F.take then
    F.need_take()
  end
  local moved, refused = F.take(key, ARGV[i + 2], tonumber(ARGV[i + 3]), ARGV[i + 4], ARGV[i + 5], ARGV[i + 6])
  return moved, refused or i + 7
end

-- Why the condition that begins at ARGV[i] does not hold; nil when it does.
function F.refused(i, index)
  local kind, key, operand = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  if kind == 'n' then
    if not F.first_live then
      F.need_ranges()
    end
    local first = F.first_live(key, 1, '')[1]
    return first and '\147' .. cmsgpack.pack(1, index) .. '\146' .. cmsgpack.pack(first) .. F.bytes(F.raw_of(F.live(first)))
  end
  local entry, held = F.live(key), nil
  if kind == 'v' then
    held = entry and entry.version == operand
  elseif kind == 'a' then
    held = not entry
  elseif kind == 'e' then
    held = entry
  elseif kind == 'm' then
    held = not entry or entry.owner == B.actor
  elseif kind == '=' then
    held = entry and entry.size == #operand and F.value_of(entry) == operand
  else
    if not F.increment then
      F.need_numbers()
    end
    local high, low = F.number_of(entry)
    if not high then
      return F.no_number(key, entry)
    end
    local least_high, least_low = F.split(operand)
    held = high > least_high or (high == least_high and low >= least_low)
  end
  if not held then
    return '\147' .. cmsgpack.pack(1, index) .. (entry and F.bytes(F.raw_of(entry)) or '\192')
  end
  return nil
end
